// The kernels on AVX2.
#define NAME "avx2"
#define TABLE table_avx2
#include "entries.h"
