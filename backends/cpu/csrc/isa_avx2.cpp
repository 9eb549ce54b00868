// The kernels on AVX2.
#define ISA_NAME "avx2"
#define ISA_TABLE table_avx2
#include "isa_entries.h"
