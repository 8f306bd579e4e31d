"""Small integers packed into words, low bits first; a code may cross from one word into the next."""

from __future__ import annotations

import math

import torch
from torch import Tensor

RUN = 8  # codes; of any width they fill whole bytes


def unpacked(words: Tensor, bits: int, count: int, axis: int = -1) -> Tensor:
    """The first `count` codes along `axis` of packed integers of any dtype, as uint8."""
    words = words.movedim(axis, -1)
    stream = in_elements_of(torch.uint8, words)
    num_runs = -(-count // RUN)
    stream = torch.nn.functional.pad(stream, (0, max(0, num_runs * bits - stream.shape[-1])))
    runs = stream[..., : num_runs * bits].unflatten(-1, (num_runs, bits))
    runs = torch.nn.functional.pad(runs, (0, 1)).to(torch.int16)
    codes = [
        (runs[..., byte] | runs[..., byte + 1] << 8) >> shift & (1 << bits) - 1
        for byte, shift in (divmod(i * bits, 8) for i in range(RUN))
    ]
    return torch.stack(codes, -1).to(torch.uint8).flatten(-2)[..., :count].movedim(-1, axis)


def packed(codes: Tensor, bits: int, axis: int = -1, word: torch.dtype = torch.int32) -> Tensor:
    """`unpacked` backwards; the last word is filled up with zeros."""
    codes = codes.movedim(axis, -1).to(torch.int32)
    num_words = -(-codes.shape[-1] * bits // (word.itemsize * 8))
    padding = -codes.shape[-1] % (word.itemsize * RUN)
    codes = torch.nn.functional.pad(codes, (0, padding)).unflatten(-1, (-1, RUN))
    runs = codes.new_zeros((*codes.shape[:-1], bits + 1))
    for i in range(RUN):
        byte, shift = divmod(i * bits, 8)
        shifted = codes[..., i] << shift
        runs[..., byte] |= shifted & 255
        runs[..., byte + 1] |= shifted >> 8
    stream = runs[..., :bits].to(torch.uint8).flatten(-2)
    return in_elements_of(word, stream)[..., :num_words].movedim(-1, axis).contiguous()


def in_elements_of(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """The same bytes, of contiguous rows, as elements of another size."""
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    return flat.view(dtype).view(*tensor.shape[:-1], -1)


def unpacked_words(words: Tensor, bits: int, count: int, axis: int = -1) -> Tensor:
    """The first `count` codes of 32-bit words that hold whole codes only, their last bits unused."""
    words = words.movedim(axis, -1)
    codes = [words >> shift & (1 << bits) - 1 for shift in range(0, 33 - bits, bits)]
    return torch.stack(codes, -1).flatten(-2)[..., :count].to(torch.uint8).movedim(-1, axis)


def words_for(count: int, bits: int) -> int:
    """How many 32-bit words hold `count` codes, the last one perhaps not full."""
    return -(-count * bits // 32)


def per_words(bits: int) -> int:
    """The fewest codes that fill 32-bit words: 8 of 4 bits, 32 of 3."""
    return 32 // math.gcd(bits, 32)
