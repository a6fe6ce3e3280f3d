"""Columns of the two state matrices that kernels read and write, one row per running sequence."""

# state, int64
FIELDS = 9
LAST = 0  # the newest token, whose keys are not in the cache yet
LENGTH = 1  # tokens whose keys are in the cache: the newest token's position
COUNT = 2  # tokens generated …
MAX = 3  # … and how many there may be …
MIN = 4  # … and must be before a stop token counts
SEED = 5
DONE = 6  # 0 while running, then STOPPED or FULL
OWN_PAGE = 7  # the first page that is read for this sequence alone; those before it are read once for a group
ADAPTER = 8  # number of its LoRA adapter, 0 for none
STOPPED = 1
FULL = 2

# parameters, float32
PARAMETERS = 8
TEMPERATURE = 0
LOGPROB_TEMPERATURE = 1  # of the logprob that is reported
TOP_P = 2
TOP_K = 3
MIN_P = 4
REPETITION = 5
PRESENCE = 6
FREQUENCY = 7
