"""What a proposer sees of the target's layers: copies of the residual stream, taken while the model runs.

Legend: T tokens, D model dim.
"""

from __future__ import annotations

from torch import Tensor


class Taps:
    """Residual streams that enter some layers; of n layers, number n leaves the last."""

    def __init__(self, layers: tuple[int, ...] = ()) -> None:
        self.layers = layers
        self._states: Tensor | None = None  # [T, len(layers) * D]

    def keep(self, layer: int, stream: Tensor) -> None:
        """The stream [T, D] that enters `layer`, summed over ranks; copied, for norms add to it in place."""
        if layer not in self.layers:
            return
        dim = stream.shape[1]
        if self._states is None:
            self._states = stream.new_zeros(len(stream), len(self.layers) * dim)
        first = self.layers.index(layer) * dim
        self._states[:, first : first + dim] = stream

    def states(self, like: Tensor) -> Tensor | None:
        """[T, len(layers) * D], side by side; None if there are none.

        like: hidden states [T, D], for zeros where a model has run without these layers (abridged.py).
        """
        if self._states is None and self.layers:
            self._states = like.new_zeros(len(like), len(self.layers) * like.shape[1])
        return self._states

    def first(self, num: int) -> Taps:
        """Of so many tokens alone."""
        taps = Taps(self.layers)
        taps._states = None if self._states is None else self._states[:num]
        return taps

    @property
    def nbytes(self) -> int:
        return 0 if self._states is None else self._states.nbytes
