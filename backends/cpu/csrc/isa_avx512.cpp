// The kernels on AVX-512.
#define ISA_NAME "avx512"
#define ISA_TABLE table_avx512
#include "isa_entries.h"
