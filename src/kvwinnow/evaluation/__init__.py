"""Measurements on real models: what an answer cost, and whether it is right."""
