"""Mixtures of experts: routers, products of plain and of packed experts, and their sum."""
