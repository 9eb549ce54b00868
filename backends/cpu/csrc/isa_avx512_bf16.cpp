// The kernels on AVX-512 with BF16 and VNNI.
#define ISA_NAME "avx512_bf16"
#define ISA_TABLE table_avx512_bf16
#include "isa_entries.h"
