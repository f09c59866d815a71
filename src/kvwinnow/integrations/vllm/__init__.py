"""The vLLM plugin: token eviction inside a stock installation, with the blocks given back to the pool.

The path of a request: ``platform`` refuses what is not served and names scheduler and worker; ``scheduler`` and
``manager`` free blocks, ``attention`` and ``compaction`` gather the kept tokens into what is left. Both sides go by
``plan`` alone, a pure function, so no message passes between them.
"""
