"""Engines over several machines: where ranks are, agents that start members there, how owners reach them."""
