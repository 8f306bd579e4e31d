"""Kernels for GPUs, in Triton and in Gluon, by what they do.

* `lang/`: what kernels are written with: Triton's language, and launches that follow each other.
* `compile/`: what is compiled, by whom, and what was compiled too late.
* `products/`: products with plain matrices, with bytes (FP8, INT8) and adapters; which kernel is whose.
* `packed/`: codes that stay packed: how they lie, and products that unpack them in registers.
* `experts/`: mixtures of experts: routers, products of plain and of packed experts, and their sum.
* `attention/`: the cache, and attention over it: decodes, prompts, latents, and what brings keys there.
* `pointwise/`: norms, gates and tables of embeddings.
* `sampling/`: from logits to tokens: noise, masks, draws, and drafts that are taken or not.
* `slots/`: what a recorded step does with its slots: inputs gathered, advanced, and drafts found in texts.
* `ranks/`: what ranks of one host send each other.
"""
