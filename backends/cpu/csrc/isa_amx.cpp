// The kernels on AMX.
#define INFERPLANE_AMX 1
#define ISA_NAME "amx"
#define ISA_TABLE table_amx
#include "isa_entries.h"
