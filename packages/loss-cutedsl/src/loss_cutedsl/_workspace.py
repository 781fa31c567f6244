"""The workspace: what the blocks of a launch tell one another through memory, in 32-bit words.

All of them are 0 before a launch and after it, so that one workspace serves every launch of a stream. Words that are
written by some blocks while others read something else lie in sectors of memory of their own.
"""

# Of rows in shared memory: the sums of slices of the targets, at most one a lane of a warp, and how many there are.
MOST_SLICES = 32
WORKSPACE_SLICES_DONE = MOST_SLICES

# How many blocks, with rings groups of threads, are done.
WORKSPACE_DONE = 33

# Of rings: the counters that slices of the targets and rows are drawn from, and between them a word of 64 bits for what
# has been counted, by slices or by teams.
WORKSPACE_SLICES_DRAWN = 40
WORKSPACE_COUNT = 48
WORKSPACE_DRAWN = 56

# From here on, of rows in shared memory: what the blocks add up, a vector each.
WORKSPACE_SUMS = 64
SUMS_WORDS = 4


def workspace_words(blocks: int) -> int:
    """64-bit words, where so many blocks add up (a cluster counts as one)."""
    return (WORKSPACE_SUMS + SUMS_WORDS * blocks) // 2


RING_WORKSPACE_WORDS = workspace_words(0)
