// Weights of 8 and 4 bits as the kernels read them.
//
// Panels: 16 weight rows stand side by side. For each group, IP_INT8 holds group / 4 lines of 64 bytes, line q with the
// bytes of columns 4q .. 4q + 3 of each row; IP_INT4 holds group / 8 lines whose low nibbles are columns 8q .. 8q + 3
// and whose high nibbles are 8q + 4 .. 8q + 7. Entries are stored with an offset, so that they are unsigned.
#pragma once
#include <string.h>

#include "inferplane_cpu.h"

namespace {

constexpr int64_t kPanel = 16;  // rows side by side

// Whether an entry is a byte; else it is a nibble.
inline bool whole_bytes(const ip_matrix &w) { return w.kind == IP_INT8 || w.kind == IP_W8A8; }
inline bool in_panels(const ip_matrix &w) { return whole_bytes(w) || w.kind == IP_INT4; }

inline int64_t group_of(const ip_matrix &w) { return w.group ? w.group : 128; }
inline int64_t groups_of(const ip_matrix &w) { return (w.k + group_of(w) - 1) / group_of(w); }
inline int64_t offset_of(const ip_matrix &w) { return whole_bytes(w) ? 128 : 8; }
inline int64_t line_columns(const ip_matrix &w) { return whole_bytes(w) ? 4 : 8; }
inline int64_t panel_bytes(const ip_matrix &w) { return groups_of(w) * group_of(w) / line_columns(w) * 64; }
inline int64_t scale_groups(const ip_matrix &w) { return w.group ? groups_of(w) : 1; }

inline int64_t packed_bytes(const ip_matrix &w) { return (w.n + kPanel - 1) / kPanel * panel_bytes(w); }

// One entry, as an integer.
inline int32_t quant_entry(const ip_matrix &w, int64_t row, int64_t column) {
  int64_t panel = row / kPanel, line = column / line_columns(w), in_line = column % line_columns(w);
  uint8_t byte = ((const uint8_t *)w.data)[panel * panel_bytes(w) + line * 64 + row % kPanel * 4 + in_line % 4];
  return (whole_bytes(w) ? byte : in_line < 4 ? byte & 15 : byte >> 4) - (int32_t)offset_of(w);
}

// Four entries of a row from `column` on, of which it has `columns`; zeros behind its end.
inline uint32_t four(const int8_t *row, int64_t column, int64_t columns) {
  uint32_t all = 0;
  if (column + 4 <= columns)
    memcpy(&all, row + column, 4);
  else if (column < columns)
    memcpy(&all, row + column, (size_t)(columns - column));
  return all;
}

// The offset is half of what a byte or a nibble holds: adding it flips the highest bit of a number in two's complement.
inline void pack(const ip_matrix &w, const int8_t *values, uint8_t *out) {
  int64_t panels = (w.n + kPanel - 1) / kPanel, lines = panel_bytes(w) / 64;
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < panels; panel++) {
    uint32_t *to = (uint32_t *)(out + panel * panel_bytes(w));
    for (int64_t r = 0; r < kPanel; r++) {
      int64_t row = panel * kPanel + r, columns = row < w.n ? w.k : 0;
      const int8_t *from = columns ? values + row * w.k : values;
      if (w.kind == IP_INT4)
        for (int64_t line = 0; line < lines; line++) {
          uint32_t low = four(from, 8 * line, columns) & 0x0f0f0f0f, high = four(from, 8 * line + 4, columns) & 0x0f0f0f0f;
          to[line * kPanel + r] = (low | high << 4) ^ 0x88888888;
        }
      else
        for (int64_t line = 0; line < lines; line++) to[line * kPanel + r] = four(from, 4 * line, columns) ^ 0x80808080;
    }
  }
}

}  // namespace
