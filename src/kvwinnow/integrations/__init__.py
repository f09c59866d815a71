"""Thin bridges to frameworks: they translate, they never decide."""
