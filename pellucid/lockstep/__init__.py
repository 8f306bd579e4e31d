"""Engines that divide the experts of a model: each of their steps is a step of all of them."""
