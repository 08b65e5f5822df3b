"""Checks that anyone can run: they take longer than tests, and write their results into data/measured."""
