// The kernels on AMX.
#define INFERPLANE_AMX 1
#define NAME "amx"
#define TABLE table_amx
#include "entries.h"
