// Any machine: vectors of 128 bits, which SSE2 and NEON have, and which other compilers' targets emulate.
#define KVW_NAMESPACE kvw_scoring_portable
#define KVW_WIDTH 4
#include "scoring_vector.h"
