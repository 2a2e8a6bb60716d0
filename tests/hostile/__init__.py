"""Hostile input: sweep files, shards, traces and command lines that are damaged, forged or plain nonsense.

`python -m tests.hostile` feeds as many as are asked for; `tests/test_hostile.py` a fixed few of them.
"""
