"""The workspace: what the blocks of a launch tell one another through memory, in 32-bit words.

All of them are 0 before a launch and after it, so that one workspace serves every launch of a stream. Words that are
written by some blocks while others read something else lie in sectors of memory of their own.
"""

# Of ``CrossEntropyForward``: the sums of slices of the targets, at most one a lane of a warp, how many there are, and
# how many blocks are done. Then what the blocks add up, a vector each.
MOST_SLICES = 32
WORKSPACE_SLICES_DONE = MOST_SLICES
WORKSPACE_DONE = 33
WORKSPACE_SUMS = 64
SUMS_WORDS = 4


def workspace_words(blocks: int) -> int:
    """64-bit words, where so many blocks add up (a cluster counts as one)."""
    return (WORKSPACE_SUMS + SUMS_WORDS * blocks) // 2


# Of ``CrossEntropyPlain``: a word of 64 bits for what has been counted, in a line of the L2 of its own; the sums of
# slices of the losses but for the last one; and the losses of the rows.
MOST_PARTS = 33
WORKSPACE_COUNT = 0
WORKSPACE_PARTS = 32
WORKSPACE_LOSSES = WORKSPACE_PARTS + 32


def plain_workspace_words(rows: int) -> int:
    """64-bit words for so many rows, whose losses are read in whole vectors."""
    return (WORKSPACE_LOSSES + (rows + 3) // 4 * 4) // 2
