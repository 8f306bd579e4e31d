"""Kernels written in Gluon, run on the CPU: enough of a Hopper multiprocessor to see whether they are right.

Triton's interpreter knows nothing of Gluon.  `emulated` executes a kernel module with stand-ins for its
language, so that its kernels are plain functions over torch's tensors.  Each partition of each program is a
thread, of which one runs at a time: they take turns at barriers, as a generator chooses.  What the hardware
does by itself is done at no certain time: copies of the TMA unit whenever turns change, products when they
are waited for.  So a tile that is read before it has come, or written before it has been read, shows in the
result, and barriers that do not meet are a deadlock, which is reported.  What this does not see: registers,
how threads share a tile, fences between the units of a multiprocessor, speed.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

PLAIN = (
    "pellucid.kernels.products.tiles",
    "pellucid.kernels.packed.packed_weight",
)  # without kernels, and with types that callers have already
MOST_SECONDS = 300.0  # of a launch
MAX_TURNS = 2_000_000  # of all threads of a launch


class DType:
    """A type of numbers, or of what a pointer points to."""

    def __init__(self, torch_dtype: torch.dtype) -> None:
        self.torch, self.primitive_bitwidth = torch_dtype, 8 * torch_dtype.itemsize
        self.element_ty = self

    def __call__(self, value: object) -> Value:
        return Value(tensor_of(value).to(self.torch))


DTYPES = {
    dtype: DType(dtype)
    for dtype in (
        torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
        torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    )
}  # fmt: skip


class Const(int):
    """A constexpr number."""

    @property
    def value(self) -> int:
        return int(self)


def constexpr(value: Any) -> Any:
    return Const(value) if type(value) is int else value


def tensor_of(value: object) -> Tensor:
    """A number or a value as a tensor; Python's own are of 32 bits."""
    if isinstance(value, Value):
        return value.tensor
    if isinstance(value, bool):
        return torch.tensor(value)
    return torch.tensor(value, dtype=torch.int32 if isinstance(value, int) else torch.float32)


def binary(operate: Callable[[Any, Any], Tensor], *, swapped: bool = False) -> Any:
    def method(self: Value, other: object) -> Value | Any:
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = self.tensor, tensor_of(other)
        return Value(operate(b, a) if swapped else operate(a, b))

    return method


def divide(a: Any, b: Any) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")  # as in C


class Value:
    """What registers hold: a tensor, or a number as a tensor without dimensions."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def tensor(self) -> Tensor:
        return self._tensor

    @property
    def dtype(self) -> DType:
        return DTYPES[self.tensor.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    __add__, __radd__ = binary(torch.add), binary(torch.add)
    __sub__, __rsub__ = binary(torch.sub), binary(torch.sub, swapped=True)
    __mul__, __rmul__ = binary(torch.mul), binary(torch.mul)
    __truediv__, __rtruediv__ = binary(torch.true_divide), binary(torch.true_divide, swapped=True)
    __floordiv__, __rfloordiv__ = binary(divide), binary(divide, swapped=True)
    __mod__, __rmod__ = binary(torch.fmod), binary(torch.fmod, swapped=True)
    __lt__, __le__, __gt__, __ge__ = map(binary, (torch.lt, torch.le, torch.gt, torch.ge))
    __eq__, __ne__ = binary(torch.eq), binary(torch.ne)
    __and__ = __rand__ = binary(torch.bitwise_and)
    __or__ = __ror__ = binary(torch.bitwise_or)
    __xor__ = __rxor__ = binary(torch.bitwise_xor)
    __rshift__, __lshift__ = binary(torch.bitwise_right_shift), binary(torch.bitwise_left_shift)
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Value:
        return Value(-self.tensor)

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __index__(self) -> int:
        return int(self.tensor)

    __int__ = __index__

    def __getitem__(self, index: Any) -> Value:
        return Value(self.tensor[index])

    def to(self, dtype: DType) -> Value:
        return Value(self.tensor.to(dtype.torch))

    def reshape(self, shape: Sequence[int]) -> Value:
        return Value(self.tensor.reshape(list(shape)))

    def permute(self, order: Sequence[int]) -> Value:
        return Value(self.tensor.permute(list(order)))

    def split(self) -> tuple[Value, Value]:
        return Value(self.tensor[..., 0]), Value(self.tensor[..., 1])


class Pointer:
    """Addresses of elements of a tensor's memory."""

    def __init__(self, memory: Tensor, at: Tensor) -> None:
        self.memory, self.at = memory, at

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        return cls(memory, torch.tensor(tensor.storage_offset()))

    @property
    def dtype(self) -> DType:
        return DTYPES[self.memory.dtype]

    def __add__(self, other: object) -> Pointer:
        return Pointer(self.memory, self.at + tensor_of(other))

    __radd__ = __add__

    def __sub__(self, other: object) -> Pointer:
        return self + Value(-tensor_of(other))

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.at[index])

    def where(self, mask: object) -> tuple[Tensor, Tensor]:
        """(places, mask), with a place inside for what is masked."""
        at, inside = torch.broadcast_tensors(self.at, torch.tensor(True) if mask is None else tensor_of(mask))
        at = at.where(inside, 0)
        assert not len(self.memory) or (int(at.min()) >= 0 and int(at.max()) < len(self.memory)), "outside"
        return at, inside


class Shared:
    """Shared memory: a view of an allocation's bytes.

    Lines longer than what is swizzled at once lie in blocks of so many bytes, one block of all lines after
    the other; how they are swizzled within does not show.
    """

    def __init__(
        self, flat: Tensor, dtype: DType, shape: Sequence[int], layout: Any, order: Any = None
    ) -> None:
        self.flat, self.dtype, self.shape = flat, dtype, list(shape)
        self.layout, self.order = layout, order

    def index(self, i: object) -> Shared:
        size = len(self.flat) // self.shape[0]
        first = int(i) * size  # type: ignore[call-overload]
        assert 0 <= first < len(self.flat), f"{i} of {self.shape}"
        return Shared(self.flat[first : first + size], self.dtype, self.shape[1:], self.layout)

    def reinterpret(self, dtype: DType, shape: Sequence[int], layout: Any) -> Shared:
        assert prod(shape) * dtype.torch.itemsize == len(self.flat), (shape, len(self.flat))
        return Shared(self.flat, dtype, shape, layout)

    def slice(self, first: int, num: int) -> Shared:
        """Some of the lines, of which each is one block."""
        assert len(self.shape) == 2 and len(self._blocks) == 1 and self.order is None, self.shape
        size = len(self.flat) // self.shape[0]
        part = self.flat[first * size : (first + num) * size]
        return Shared(part, self.dtype, [num, self.shape[1]], self.layout)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.flat, self.dtype, self.shape, self.layout, list(order))

    @property
    def _blocks(self) -> Tensor:
        """[blocks, lines.., numbers of a line's block]"""
        width = self.shape[-1]
        swizzled = self.layout.swizzle_byte_width // self.dtype.torch.itemsize
        width = min(width, swizzled or width)
        return self.flat.view(self.dtype.torch).view(self.shape[-1] // width, *self.shape[:-1], width)

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        held = self._blocks.movedim(0, -2).reshape(self.shape)
        return held if self.order is None else held.permute(self.order)

    def load(self, layout: object = None) -> Value:
        return Value(self.tensor.clone())

    def store(self, value: Value) -> None:
        new = value.tensor if self.order is None else value.tensor.permute(self.order)
        assert list(new.shape) == self.shape and new.dtype == self.dtype.torch, (new.shape, self.shape)
        blocks = self._blocks
        blocks.copy_(new.reshape(*self.shape[:-1], len(blocks), -1).movedim(-2, 0))

    def _keep_alive(self) -> None:
        pass


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self) -> None:
        self.count = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = 0

    def arrive(self) -> None:
        assert self.missing > 0, "more arrivals than a phase has"
        self.missing -= 1
        self.turn()

    def turn(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1


class Barriers(list[Barrier]):
    def index(self, i: object) -> Barrier:  # type: ignore[override]
        return self[int(i)]  # type: ignore[call-overload]


class Product(Value):
    """A product of the tensor cores that is under way."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute: Callable[[], Tensor] | None = compute

    def finish(self) -> None:
        if self._compute is not None:
            self._tensor, self._compute = self._compute(), None

    @property
    def tensor(self) -> Tensor:
        assert self._compute is None, "a product is read before it was waited for"
        return self._tensor


class Deadlock(AssertionError):
    """No thread can go on."""


class Thread:
    """One partition of one program."""

    def __init__(
        self, machine: Machine, run: Callable[[], None], ids: Sequence[int], grid: Sequence[int]
    ) -> None:
        self.machine, self.ids, self.grid = machine, ids, grid
        self.may_go_on: Callable[[], bool] = lambda: True
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        self.group: list[Callable[[], None]] = []  # copies of Ampere's kind
        self.groups: list[list[Callable[[], None]]] = []
        self.memory: Tensor | None = None  # what shared memory begins with
        self.turn = threading.Event()
        self.is_done = False
        self._run = run
        self._thread = threading.Thread(target=self._live, daemon=True)

    def start(self) -> None:
        self.machine.threads.append(self)
        self._thread.start()

    def _live(self) -> None:
        HERE.thread = self
        self.turn.wait()
        try:
            if self.machine.error is None:
                self._run()
        except BaseException as error:
            self.machine.error = self.machine.error or error
        self.is_done = True
        self.machine.threads.remove(self)
        self.machine.pass_on()

    def wait_until(self, may_go_on: Callable[[], bool]) -> None:
        """Let others run, and then go on as soon as that holds."""
        self.may_go_on = may_go_on
        self.turn.clear()
        self.machine.pass_on()
        self.turn.wait()
        if self.machine.error is not None:
            raise SystemExit


HERE = threading.local()


class Machine:
    """Runs the threads of a launch, one at a time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.threads = rng, list[Thread]()
        self.error: BaseException | None = None
        self.copies: list[Callable[[], None]] = []  # of the TMA unit, under way
        self.ended = threading.Event()
        self._num_turns = 0

    def pass_on(self) -> None:
        """Choose who runs next."""
        self._num_turns += 1
        if self._num_turns > MAX_TURNS:
            self.error = self.error or Deadlock("too many turns")
        if not self.threads:
            self.ended.set()
            return
        try:
            ready = self._ready()
        except BaseException as error:  # of a copy, for instance
            self.error = self.error or error
            ready = []
        if not ready:
            self.error = self.error or Deadlock(f"{len(self.threads)} threads wait for one another")
        self.rng.choice(self.threads if self.error else ready).turn.set()

    def _ready(self) -> list[Thread]:
        """Who may go on, when as many copies have ended as chance wants, or as it takes."""
        while self.copies and self.rng.random() < 0.5:
            self._end_copy()
        ready = [thread for thread in self.threads if thread.may_go_on()]
        while not ready and self.copies:
            self._end_copy()
            ready = [thread for thread in self.threads if thread.may_go_on()]
        return ready

    def _end_copy(self) -> None:
        self.copies.pop(self.rng.randrange(len(self.copies)))()


class Kernel:
    """A function of a kernel, called by others or launched."""

    def __init__(self, function: Callable[..., Any], seed: int) -> None:
        self.function, self.seed = function, seed
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return lambda *args, **named: self.launch(grid, args, named)

    def launch(self, grid: Sequence[int], args: Sequence[Any], named: dict[str, Any]) -> None:
        """Run all programs, as many at once as there are: some wait for others."""
        kinds = self.function.__annotations__
        names = self.function.__code__.co_varnames[: self.function.__code__.co_argcount]
        given = dict(zip(names, args, strict=False)) | {name: named[name] for name in names if name in named}
        made = {
            name: constexpr(value) if "constexpr" in str(kinds.get(name)) else argument(value)
            for name, value in given.items()
        }
        machine, grid = Machine(random.Random(self.seed)), [*grid, 1, 1][:3]
        places = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        threads = [Thread(machine, lambda: self.function(**made), ids, grid) for ids in places]
        for thread in threads:
            thread.start()
        machine.pass_on()
        assert machine.ended.wait(MOST_SECONDS), "a launch does not end"
        if machine.error is not None:
            raise machine.error


def argument(value: Any) -> Any:
    """As a kernel sees what it is launched with."""
    if isinstance(value, Tensor):
        return Pointer.to(value)
    return Value(tensor_of(value)) if isinstance(value, int | float) else value


def jit(function: Callable[..., Any] | None = None, *, seed: int = 0, **_: object) -> Any:
    return partial(Kernel, seed=seed) if function is None else Kernel(function, seed)


class Descriptor:
    """A tensor of which boxes are copied."""

    def __init__(
        self,
        base: Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        block_shape: Sequence[int],
        layout: Any,
    ) -> None:
        assert strides[-1] == 1 and all(stride * base.itemsize % 16 == 0 for stride in strides[:-1]), strides
        assert base.data_ptr() % 16 == 0
        self.view = torch.as_strided(base, list(shape), list(strides))
        self.block_shape, self.layout, self.dtype = list(block_shape), layout, DTYPES[base.dtype]

    @classmethod
    def from_tensor(cls, tensor: Tensor, block_shape: Sequence[int], layout: Any) -> Descriptor:
        return cls(tensor, tensor.shape, tensor.stride(), block_shape, layout)

    def box(self, at: Sequence[object]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(where a box is in the tensor, which part of the box that is)"""
        there, here = [], []
        firsts = [int(each) for each in at]  # type: ignore[call-overload]
        for first, length, size in zip(firsts, self.block_shape, self.view.shape, strict=True):
            start, end = min(max(first, 0), size), max(min(first + length, size), 0)
            there.append(slice(start, max(start, end)))
            here.append(slice(start - first, max(start, end) - first))
        return tuple(there), tuple(here)


def init(barrier: Barrier, count: int) -> None:
    barrier.init(int(count))


def expect(barrier: Barrier, num_bytes: object, pred: object = True) -> None:
    if pred:
        barrier.bytes += int(num_bytes)  # type: ignore[call-overload]
        barrier.arrive()
        HERE.thread.wait_until(lambda: True)


def arrive(barrier: Barrier, count: int = 1, pred: object = True) -> None:
    if pred:
        barrier.arrive()
        HERE.thread.wait_until(lambda: True)


def wait(barrier: Barrier, phase: object, pred: object = True) -> None:
    if pred:
        parity = int(phase)  # type: ignore[call-overload]
        HERE.thread.wait_until(lambda: barrier.phase % 2 != parity)


def load_box(
    box: Descriptor, at: Sequence[object], barrier: Barrier, room: Shared, pred: object = True
) -> None:
    if not pred:
        return
    there, here = box.box(at)
    assert room.shape == box.block_shape and room.dtype is box.dtype, (room.shape, box.block_shape)

    def copy() -> None:
        new = torch.zeros(box.block_shape, dtype=box.dtype.torch)
        new[here] = box.view[there]
        room.store(Value(new))
        barrier.bytes -= new.nbytes
        assert barrier.bytes >= 0, "more bytes than were expected"
        barrier.turn()

    HERE.thread.machine.copies.append(copy)


def store_box(box: Descriptor, at: Sequence[object], room: Shared) -> None:
    there, here = box.box(at)
    assert room.shape == box.block_shape, (room.shape, box.block_shape)

    def copy() -> None:
        box.view[there] = room.tensor[here]

    HERE.thread.stores.append(copy)


def copy_ahead(room: Shared, pointer: Pointer, mask: object = None) -> None:
    def copy() -> None:
        room.store(load(pointer, mask))

    HERE.thread.group.append(copy)


def commit_group() -> None:
    here = HERE.thread
    here.groups.append(here.group)
    here.group = []


def wait_group(most: int) -> None:
    groups = HERE.thread.groups
    while len(groups) > most:
        for copy in groups.pop(0):
            copy()


def store_wait(most: int) -> None:
    stores = HERE.thread.stores
    while len(stores) > most:
        stores.pop(0)()


def multiply(a: Any, b: Any, acc: Value, *, use_acc: object = True, is_async: bool = False) -> Product:
    def compute() -> Tensor:
        wide = torch.float32 if a.dtype.torch.is_floating_point else torch.float64  # exact
        product = (a.tensor.to(wide) @ b.tensor.to(wide)).to(acc.dtype.torch)
        return product + acc.tensor if use_acc else product

    product = Product(compute)
    HERE.thread.products.append(product)
    if not is_async:
        wait_for_products(0, deps=[product])
    return product


def wait_for_products(most: int, deps: Sequence[Any]) -> Any:
    products = HERE.thread.products
    while len(products) > most:
        products.pop(0).finish()
    return deps[0] if len(deps) == 1 else tuple(deps)


def warp_specialize(parts: Sequence[tuple[Kernel, Sequence[Any]]], warps: object, registers: object) -> None:
    """Each part in a thread of its own."""
    here = HERE.thread
    threads = [
        Thread(here.machine, lambda part=part, args=args: part(*args), here.ids, here.grid)
        for part, args in parts
    ]
    for thread in threads:
        thread.start()
    here.wait_until(lambda: all(thread.is_done for thread in threads))


def allocate(dtype: DType, shape: Sequence[int], layout: Any) -> Shared | Barriers:
    if layout is MBarrierLayout:
        return Barriers(Barrier() for _ in range(shape[0]))
    garbage = torch.full((prod(shape) * dtype.torch.itemsize,), 0xFF, dtype=torch.uint8)  # NaN of any type
    HERE.thread.memory = garbage if HERE.thread.memory is None else HERE.thread.memory
    return Shared(garbage, dtype, [int(n) for n in shape], layout)


def load(pointer: Pointer, mask: object = None, other: float = 0, **_: object) -> Value:
    at, mask = pointer.where(mask)
    return Value(pointer.memory[at].where(mask, torch.tensor(other, dtype=pointer.memory.dtype)))


def store(pointer: Pointer, value: object, mask: object = None) -> None:
    at, mask = pointer.where(mask)
    new = tensor_of(value).to(pointer.memory.dtype).broadcast_to(at.shape)
    pointer.memory[at[mask]] = new[mask]


def atomic_add(pointer: Pointer, value: object, **_: object) -> Value:
    HERE.thread.wait_until(lambda: True)
    old = pointer.memory[pointer.at].clone()
    pointer.memory[pointer.at] += tensor_of(value)
    return Value(old)


def elementwise(
    assembly: str, constraints: str, args: Sequence[Value], *,
    dtype: DType | tuple[DType, ...], pack: int = 1, **_: object,
) -> Value | tuple[Value, ...]:  # fmt: skip
    if isinstance(args[0], Pointer):  # nothing is written
        args[0].where(None)
        return Value(torch.zeros_like(args[0].at))
    if args[0].dtype.torch == torch.int32:
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        inputs = torch.broadcast_tensors(*(arg.tensor.view(torch.int32).long() & 0xFFFFFFFF for arg in args))
        if pack > 1:  # elements of the last dimension, which a thread has, are registers beside each other
            inputs = [register for bits in inputs for register in bits.unbind(-1)]
        registers = executed(assembly, pack * len(dtypes), inputs)
        if pack > 1:
            registers = [torch.stack(registers[i : i + pack], -1) for i in range(0, len(registers), pack)]
        made = tuple(
            Value(
                bits.to(torch.uint32).view(made.torch)
                if made.torch.itemsize == 4
                else halves(bits)[0].view(made.torch)
            )
            for bits, made in zip(registers, dtypes, strict=True)
        )
        return made if isinstance(dtype, tuple) else made[0]
    assert isinstance(dtype, DType)
    (x,) = args
    instruction = assembly.split(maxsplit=1)[0]
    compute: dict[str, Callable[[Tensor], Tensor]] = {
        "ex2.approx.ftz.f32": torch.exp2,
        "rcp.approx.ftz.f32": torch.reciprocal,
        "cvt.rn.bf16x2.f32": lambda x: x,
        "cvt.rn.f16x2.f32": lambda x: x,
    }
    return Value(compute[instruction](x.tensor).to(dtype.torch))


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper 16 bits of int64 numbers of 32, as int16."""
    low, high = bits & 0xFFFF, bits >> 16 & 0xFFFF
    return low.to(torch.uint16).view(torch.int16), high.to(torch.uint16).view(torch.int16)


def together(low: Tensor, high: Tensor) -> Tensor:
    """`halves` backwards, of any type of 16 bits."""
    return low.view(torch.uint16).long() | high.view(torch.uint16).long() << 16


def permuted(low: Tensor, high: Tensor, selector: Tensor) -> Tensor:
    """PTX's prmt: four bytes of eight."""
    eight, result = low | high << 32, torch.zeros_like(low | high | selector)
    for i in range(4):
        choice = selector >> 4 * i & 15
        assert bool((choice < 8).all()), "a sign would be repeated"
        result = result | (eight >> 8 * choice & 255) << 8 * i
    return result


def in_pairs(registers: Sequence[Tensor], type: torch.dtype) -> Tensor:
    """Registers of warps, each of two numbers, as float32 [registers, warps, 8, 4, 2]."""
    return torch.stack([torch.stack(halves(each), -1).view(type).float() for each in registers]).view(
        len(registers), -1, 8, 4, 2
    )


def multiplied_by_warps(names: Sequence[Tensor], type: torch.dtype) -> list[Tensor]:
    """PTX's mma.m16n8k16 on registers of whole warps: A's four, B's two, and the sums' four, float32."""
    names = torch.broadcast_tensors(*names)
    a = in_pairs(names[:4], type).unflatten(0, (2, 2)).permute(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
    b = in_pairs(names[4:6], type).permute(1, 0, 3, 4, 2).reshape(-1, 16, 8)
    sums = torch.stack([each.to(torch.uint32).view(torch.float32) for each in names[6:]])
    sums = sums.view(2, 2, -1, 8, 4).permute(2, 0, 3, 4, 1).reshape(-1, 16, 8)
    made = (a @ b + sums).view(-1, 2, 8, 4, 2).permute(1, 4, 0, 2, 3).reshape(4, -1)
    return list(made.contiguous().view(torch.int32).long() & 0xFFFFFFFF)


def bits_of(numbers: Tensor) -> Tensor:
    """float32's, as int64."""
    return numbers.float().view(torch.int32).long() & 0xFFFFFFFF


def executed(assembly: str, num_results: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    """PTX on numbers of 32 bits: the instructions that unpack codes, one after the other."""
    places = {f"${num_results + i}": bits for i, bits in enumerate(inputs)}
    places["global_smem"] = torch.tensor(0)

    def of(name: str) -> Tensor:
        return places[name] if name in places else torch.tensor(int(name, 0))

    def shared(name: str) -> tuple[Tensor, Tensor]:
        """(shared memory, which of its words)"""
        base, _, offset = name.strip("[]").partition("+")
        memory = HERE.thread.memory
        assert memory is not None, "a program has no shared memory"
        return memory.view(torch.int32), (of(base) + int(offset or 0)) // 4

    def in_halves(operate: Callable[..., Tensor], type: torch.dtype, *names: str) -> Tensor:
        operands = [halves(of(name)) for name in names]
        made = [operate(*(half[i].view(type).double() for half in operands)).to(type) for i in range(2)]
        return together(*made)

    for line in assembly.strip().removeprefix("{").removesuffix("}").split(";"):
        if not line.strip() or ".reg" in line or "bar.warp" in line:
            continue
        instruction, _, rest = line.strip().partition(" ")
        condition = None
        if instruction.startswith("@"):
            condition = of(instruction[1:])
            instruction, _, rest = rest.partition(" ")
        names = [name.strip(" {}") for name in rest.split(",")]
        target, first, *others = names
        kind, type = instruction.split(".")[0], instruction.split(".")[-1]
        before = places.get(target)
        if kind == "st":
            memory, at = shared(target)
            for i, name in enumerate([first, *others]):
                memory[at + i] = of(name).to(torch.uint32).view(torch.int32)
        elif kind == "ld":
            memory, at = shared(first)
            places[target] = memory[at].long() & 0xFFFFFFFF
        elif kind == "mma":
            of_a = torch.bfloat16 if ".bf16." in instruction else torch.float16
            places.update(zip(names[:4], multiplied_by_warps(list(map(of, names[4:])), of_a), strict=True))
        elif kind == "cvt":
            places[target] = bits_of(of(first).to(torch.uint16).view(torch.float16))
        elif type == "f32":
            floats = [of(name).to(torch.uint32).view(torch.float32).double() for name in (first, *others)]
            places[target] = bits_of({"fma": lambda x, y, z: x * y + z, "neg": torch.neg}[kind](*floats))
        elif type in ("bf16x2", "f16x2"):
            operate = {
                "add": torch.add, "sub": torch.sub, "mul": torch.mul, "fma": lambda x, y, z: x * y + z
            }[kind]  # fmt: skip
            dtype = torch.bfloat16 if type == "bf16x2" else torch.float16
            places[target] = in_halves(operate, dtype, first, *others)
        elif len(names) == 3 and kind == "mov" and not rest.lstrip().startswith("{"):  # together
            low, high = (of(name) & 0xFFFF for name in names[1:])
            places[target] = low | high << 16
        elif len(names) == 3 and kind == "mov":  # apart
            for name, half in zip(names, halves(of(others[0])), strict=False):
                places[name] = half.view(torch.uint16).long()
        elif kind == "prmt":
            places[target] = permuted(of(first), of(others[0]), of(others[1]))
        else:
            places[target] = {
                "mov": lambda a: a,
                "add": lambda a, b: a + b & 0xFFFFFFFF,
                "mad": lambda a, b, c: a * b + c & 0xFFFFFFFF,
                "setp": lambda a, b: a > b,
                "or": torch.bitwise_or,
                "and": torch.bitwise_and,
                "xor": torch.bitwise_xor,
                "shl": lambda a, n: a << n & 0xFFFFFFFF,
                "shr": torch.bitwise_right_shift,
                "shf": lambda low, high, n: (high << n | low >> 32 - n) & 0xFFFFFFFF,  # to the left
                "lop3": lambda a, b, c, table: (a & b) ^ c if int(table) == 0x6A else a & b | c,
            }[kind](*map(of, (first, *others)))
            assert kind != "lop3" or others[-1] in ("0xea", "0x6a"), line
            assert kind != "setp" or ".gt.u32" in instruction, line
        if condition is not None and before is not None:
            places[target] = places[target].where(condition, before)
    results = torch.broadcast_tensors(*(places[f"${i}"] for i in range(num_results)))
    return list(results)


def where(condition: object, a: object, b: object) -> Value:
    return Value(torch.where(tensor_of(condition), tensor_of(a), tensor_of(b)))


def elementary(function: Callable[..., Tensor]) -> Callable[..., Value]:
    return lambda *args: Value(function(*map(tensor_of, args)))


def MBarrierLayout() -> Any:  # noqa: N802 Gluon's name
    return MBarrierLayout


def anything(*args: object, **named: object) -> SimpleNamespace:
    """A layout of threads."""
    return SimpleNamespace()


def blocked_layout(size: object, threads: object, warps: object, order: object) -> SimpleNamespace:
    return SimpleNamespace(warps_per_cta=warps)


def shared_layout(swizzle_byte_width: int, element_bitwidth: int, rank: int = 2) -> SimpleNamespace:
    return SimpleNamespace(swizzle_byte_width=swizzle_byte_width)


def swizzled_layout(*args: object) -> SimpleNamespace:
    return SimpleNamespace(swizzle_byte_width=1 << 30)


LANGUAGE: dict[str, Any] = {
    **{str(dtype).removeprefix("torch."): made for dtype, made in DTYPES.items()},
    "float8e4nv": DTYPES[torch.float8_e4m3fn],
    "constexpr": constexpr,
    "static_range": range,
    "shared_memory_descriptor": Shared,
    "barrier": lambda: None,  # of threads that are one here
    "program_id": lambda axis: Value(tensor_of(HERE.thread.ids[axis])),
    "num_programs": lambda axis: Value(tensor_of(HERE.thread.grid[axis])),
    "allocate_shared_memory": allocate,
    "warp_specialize": warp_specialize,
    "arange": lambda start, end, layout=None: Value(torch.arange(start, end, dtype=torch.int32)),
    "zeros": lambda shape, dtype, layout=None: Value(torch.zeros(list(shape), dtype=dtype.torch)),
    "full": lambda shape, value, dtype, layout=None: Value(torch.full(list(shape), value, dtype=dtype.torch)),
    "full_like": lambda x, value: Value(torch.full_like(x.tensor, value)),
    "join": lambda x, y: Value(torch.stack((x.tensor, y.tensor), -1)),
    "zeros_like": elementary(torch.zeros_like),
    "where": where,
    "minimum": elementary(torch.minimum),
    "maximum": elementary(torch.maximum),
    "exp2": elementary(torch.exp2),
    "exp": elementary(torch.exp),
    "abs": elementary(torch.abs),
    "fma": elementary(lambda x, y, z: x * y + z),
    "sigmoid": elementary(torch.sigmoid),
    "cdiv": lambda a, b: (a + b - 1) // b,
    "max": lambda x, axis: Value(x.tensor.amax(axis)),
    "sum": lambda x, axis: Value(x.tensor.sum(axis, dtype=x.dtype.torch)),
    "split": lambda x: x.split(),
    "broadcast": lambda x, y: tuple(map(Value, torch.broadcast_tensors(x.tensor, y.tensor))),
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "load": load,
    "store": store,
    "atomic_add": atomic_add,
    "inline_asm_elementwise": elementwise,
    "NVMMASharedLayout": shared_layout,
    "BlockedLayout": blocked_layout,
    "SwizzledSharedLayout": swizzled_layout,
    **dict.fromkeys(
        (
            "NVMMADistributedLayout",
            "SliceLayout",
            "DotOperandLayout",
            "DistributedLinearLayout",
        ),
        anything,
    ),
}
HOPPER: dict[str, Any] = {
    "mbarrier": SimpleNamespace(
        init=init, expect=expect, arrive=arrive, wait=wait, MBarrierLayout=MBarrierLayout
    ),
    "tma": SimpleNamespace(async_load=load_box, async_store=store_box, store_wait=store_wait),
    "fence_async_shared": lambda: None,
    "warpgroup_mma": multiply,
    "warpgroup_mma_wait": wait_for_products,
    "TensorDescriptor": Descriptor,
}


AMPERE_COPY = SimpleNamespace(async_load=copy_ahead, commit_group=commit_group, wait_group=wait_group)


def module_of(contents: dict[str, Any]) -> ModuleType:
    module = ModuleType("emulated")
    module.__dict__.update(contents)
    return module


@contextmanager
def replaced_modules(stand_ins: dict[str, ModuleType]) -> Iterator[None]:
    """Within, kernel modules are imported anew, and find these."""
    package, experimental = map(import_module, ("pellucid.kernels", "triton.experimental"))
    attributes = [(module, dict(vars(module))) for module in (package, experimental)]

    def is_mine(name: str) -> bool:
        return name in stand_ins or (name.startswith("pellucid.kernels.") and name not in PLAIN)

    away = {name: sys.modules.pop(name) for name in list(sys.modules) if is_mine(name)}
    sys.modules.update(stand_ins)
    vars(experimental)["gluon"] = stand_ins["triton.experimental.gluon"]
    try:
        yield
    finally:
        for name in filter(is_mine, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(away)
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)


def stand_ins(seed: int) -> dict[str, ModuleType]:
    """What kernel modules import of Triton, and those of our modules that know about its launches."""
    language = module_of(LANGUAGE)
    decorate = partial(jit, seed=seed)
    triton = {
        "jit": decorate,
        "cdiv": lambda a, b: -(-a // b),
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
    }
    dependent = {
        "dependent": lambda: {"DEPENDENT": False},
        "let_next_start": lambda _: None,
        "wait": lambda _: None,
        "ask_for": lambda _: None,
    }
    modules = {
        "triton.experimental.gluon": module_of(
            {"jit": decorate, "language": language, "constexpr_function": lambda function: function}
        ),
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia": module_of({}),
        "triton.experimental.gluon.language.nvidia.hopper": module_of(HOPPER),
        "triton.experimental.gluon.language.nvidia.ampere": module_of({"async_copy": AMPERE_COPY}),
        "triton.experimental.gluon.nvidia": module_of({}),
        "triton.experimental.gluon.nvidia.hopper": module_of(HOPPER),
        "pellucid.kernels.lang.dependent": module_of(dependent),
    }
    ours = {"tl": language, "triton": module_of(triton), "has_triton": lambda: True}
    return modules | {"pellucid.kernels.lang.language": module_of(ours)}


def emulated(name: str, *edits: tuple[str, str], num_multiprocessors: int = 3, seed: int = 0) -> Any:
    """The kernel module of this name, as it is on a Hopper GPU of so many multiprocessors.

    edits: texts of its source and what they are replaced by, to see whether a fault is noticed.  seed: of the
    order in which things happen.
    """
    spec = find_spec(f"pellucid.kernels.{name}")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    for old, new in edits:
        assert source.count(old) == 1, f"{source.count(old)} times: {old}"
        source = source.replace(old, new)
    module = ModuleType(spec.name)
    with replaced_modules(stand_ins(seed)):
        sys.modules[spec.name] = module
        exec(compile(source, spec.origin, "exec"), module.__dict__)
    # Of modules that are Triton's, whose constants are, too.
    constants = {name: value for name, value in vars(module).items() if isinstance(value, tl.constexpr)}
    module.__dict__.update({name: constexpr(value.value) for name, value in constants.items()})
    module.__dict__["num_multiprocessors"] = lambda _: num_multiprocessors
    return module
