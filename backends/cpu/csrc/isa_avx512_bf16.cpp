// The kernels on AVX-512 with BF16 and VNNI.
#define NAME "avx512_bf16"
#define TABLE table_avx512_bf16
#include "entries.h"
