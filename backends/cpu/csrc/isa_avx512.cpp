// The kernels on AVX-512.
#define NAME "avx512"
#define TABLE table_avx512
#include "entries.h"
