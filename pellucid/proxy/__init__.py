"""Servers for prompts and servers that go on, seen as one: `pellucid route`."""
