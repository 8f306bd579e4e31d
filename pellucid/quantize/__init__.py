"""Quantized checkpoints made of plain ones, one decoder layer in memory at a time.

`run` is the loop; `stage` runs samples through a layer, `methods` has what may be done to its matrices,
`output` writes them, `report` says what it cost.
"""
