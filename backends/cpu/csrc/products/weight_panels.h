// Weights of 8, 6 and 4 bits in the layout that the products read: panels. Packing (`ip_pack_weight`), sizes, and access
// to one entry.
//
// A panel is 16 weight rows side by side. For each group of columns, IP_INT8 has group / 4 lines of 64 bytes: line q
// holds columns 4q .. 4q + 3 of each row. IP_INT4 has group / 8 lines whose low nibbles are columns 8q .. 8q + 3 and
// whose high nibbles are columns 8q + 4 .. 8q + 7. IP_INT6 has three lines per 16 columns: four bytes a row hold columns
// 0 .. 3 in their upper six bits in the first, 4 .. 7 in their lower six bits in the second and 8 .. 11 in their upper
// six in the third; the two bits that each leaves are those of columns 12 .. 15, the lowest ones in the first. Entries
// are stored with an offset that makes them unsigned (128, 32 or 8; 0 if there are minimums and entries of 4 bits).
// IP_MXFP4 has the lines of IP_INT4, of nibbles as the format defines them; products look them up and get entries with
// an offset of 12.
#pragma once
#include <string.h>

#include "inferplane_cpu.h"

namespace {

constexpr int64_t kPanelRows = 16;  // weight rows side by side

// Whether an entry of this kind is a byte.
constexpr bool is_byte_kind(int kind) { return kind == IP_INT8 || kind == IP_W8A8; }
// Whether an entry is a byte (int8 or W8A8; then 4 columns are a line); an int4 entry is a nibble.
inline bool is_int8(const ip_matrix &w) { return is_byte_kind(w.kind); }
// Whether an entry of this kind is a nibble: int4 or MXFP4.
constexpr bool has_nibbles(int kind) { return kind == IP_INT4 || kind == IP_MXFP4; }
// Whether the weight is in panels: int8, W8A8, int6, int4 or MXFP4.
inline bool is_in_panels(const ip_matrix &w) { return is_int8(w) || w.kind == IP_INT6 || has_nibbles(w.kind); }

// The entries of MXFP4 by their nibbles: twice the values of e2m1.
constexpr int8_t kMxfp4Entries[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int kMxfp4Offset = 12;

// Columns that are laid out together: those that share a scale, or 128 where a row has one scale.
inline int64_t group_size(const ip_matrix &w) { return w.group ? w.group : 128; }
// Groups of columns in a row, the last one padded; an even number of groups of 16, which fills steps of 32 columns.
inline int64_t num_groups(const ip_matrix &w) {
  int64_t step = w.group == 16 ? 32 : group_size(w);
  return (w.k + step - 1) / step * (step / group_size(w));
}
// Whether a number is added to each value, one per group of columns.
inline bool has_minimums(const ip_matrix &w) { return w.minimum || w.minimum_f16 || w.minimum_code; }
// What is added to an entry so that it is unsigned.
inline int64_t entry_offset(const ip_matrix &w) {
  return is_int8(w) ? 128 : w.kind == IP_INT6 ? 32 : w.kind == IP_MXFP4 ? kMxfp4Offset : has_minimums(w) ? 0 : 8;
}
// Columns that one line of 64 bytes holds for each of 16 rows; not of IP_INT6.
inline int64_t columns_per_line(const ip_matrix &w) { return is_int8(w) ? 4 : 8; }
constexpr int64_t kSixBitColumns = 16, kSixBitLines = 3;  // columns of IP_INT6 that lie together, and their lines
// Bytes of 16 rows of `columns` columns, a multiple of those that lie together.
inline int64_t columns_bytes(const ip_matrix &w, int64_t columns) {
  return 64 * (w.kind == IP_INT6 ? columns / kSixBitColumns * kSixBitLines : columns / columns_per_line(w));
}
// The size of one panel, of which a weight has ceil(n / 16).
inline int64_t panel_bytes(const ip_matrix &w) { return columns_bytes(w, num_groups(w) * group_size(w)); }
// Scales per row.
inline int64_t num_scale_groups(const ip_matrix &w) { return w.group ? num_groups(w) : 1; }

// Columns that share a unit of scales which are integers.
constexpr int64_t kUnitColumns = 256;
// Units per row, and the binary logarithm of the groups that share one.
inline int64_t num_units(const ip_matrix &w) { return (w.k + kUnitColumns - 1) / kUnitColumns; }
inline int unit_shift(const ip_matrix &w) { return w.group == 16 ? 4 : w.group == 32 ? 3 : w.group == 64 ? 2 : 1; }

// The size of all panels of a weight.
inline int64_t packed_weight_bytes(const ip_matrix &w) { return (w.n + kPanelRows - 1) / kPanelRows * panel_bytes(w); }

// Entry (row, column) of a weight in panels, as a signed integer without its scale.
inline int32_t unpack_entry(const ip_matrix &w, int64_t row, int64_t column) {
  if (w.kind == IP_INT6) {
    const uint8_t *at = (const uint8_t *)w.data + row / kPanelRows * panel_bytes(w) +
                        columns_bytes(w, column / kSixBitColumns * kSixBitColumns) + row % kPanelRows * 4 + column % 4;
    int64_t four = column % kSixBitColumns / 4;
    int32_t rest = (at[0] & 3) | (at[64] >> 6) << 2 | (at[128] & 3) << 4;
    return (four == 3 ? rest : four == 1 ? at[64] & 63 : at[64 * four] >> 2) - (int32_t)entry_offset(w);
  }
  int64_t panel = row / kPanelRows, line = column / columns_per_line(w), in_line = column % columns_per_line(w);
  uint8_t byte = ((const uint8_t *)w.data)[panel * panel_bytes(w) + line * 64 + row % kPanelRows * 4 + in_line % 4];
  int32_t stored = is_int8(w) ? byte : in_line < 4 ? byte & 15 : byte >> 4;
  return w.kind == IP_MXFP4 ? kMxfp4Entries[stored] : stored - (int32_t)entry_offset(w);
}

// Entries column .. column + 4 of a row of `columns` int8 entries, one per byte, the first one lowest; zeros for
// entries after the row's end.
inline uint32_t load_four(const int8_t *row, int64_t column, int64_t columns) {
  uint32_t all = 0;
  if (column + 4 <= columns)
    memcpy(&all, row + column, 4);
  else if (column < columns)
    memcpy(&all, row + column, (size_t)(columns - column));
  return all;
}

// The nibbles of MXFP4 by entries as unsigned bytes; 255 for what is no entry.
struct Mxfp4Nibbles {
  uint8_t of[256];
  Mxfp4Nibbles() {
    memset(of, 255, sizeof of);
    for (int nibble = 15; nibble >= 0; nibble--) of[(uint8_t)kMxfp4Entries[nibble]] = (uint8_t)nibble;  // 0: nibble 0
  }
  // The nibbles of four entries, one per byte; `missing` becomes true if one of them is no entry.
  uint32_t look_up(uint32_t four, bool &missing) const {
    uint32_t found = 0;
    for (int i = 0; i < 4; i++) found |= (uint32_t)of[four >> 8 * i & 255] << 8 * i;
    missing |= (found & 0xf0f0f0f0) != 0;
    return found & 0x0f0f0f0f;
  }
};

// Writes 16 columns of a row, four numbers of four int8 entries each, to the row's places in three lines of IP_INT6.
// Returns whether all are from -32 to 31.
inline bool pack_six_bits(const uint32_t fours[4], uint32_t *to) {
  uint32_t e[4], beyond = 0;
  for (int i = 0; i < 4; i++) {
    e[i] = (fours[i] & 0x3f3f3f3f) ^ 0x20202020;
    uint32_t sign = (fours[i] >> 5 & 0x01010101) * 7;  // bits 5 to 7 of an entry are alike
    beyond |= (fours[i] >> 5 & 0x07070707) ^ sign;
  }
  to[0] = e[0] << 2 | (e[3] & 0x03030303);
  to[kPanelRows] = e[1] | (e[3] & 0x0c0c0c0c) << 4;
  to[2 * kPanelRows] = e[2] << 2 | (e[3] >> 4 & 0x03030303);
  return !beyond;
}

// Writes `values` [n, k], dense, to `out` as panels of packed_weight_bytes(w) bytes; rows and columns after the last
// are entries of value 0. Entries of 4 bits with minimums are written as they are. It starts its own OpenMP team and
// returns when all is written. Adding the offset flips the highest bit of a number in two's complement, since the offset
// is half of what a byte, six bits or a nibble hold. Returns false if w is IP_MXFP4 or IP_INT6 and a value is none of
// its entries.
inline bool pack_weight(const ip_matrix &w, const int8_t *values, uint8_t *out) {
  int64_t panels = (w.n + kPanelRows - 1) / kPanelRows, lines = panel_bytes(w) / 64;
  const Mxfp4Nibbles nibbles;
  bool missing = false;
#pragma omp parallel for schedule(static) reduction(|| : missing)
  for (int64_t panel = 0; panel < panels; panel++) {
    uint32_t *to = (uint32_t *)(out + panel * panel_bytes(w));
    for (int64_t r = 0; r < kPanelRows; r++) {
      int64_t row = panel * kPanelRows + r, columns = row < w.n ? w.k : 0;
      const int8_t *from = columns ? values + row * w.k : values;
      if (w.kind == IP_INT4)
        for (int64_t line = 0; line < lines; line++) {
          uint32_t low = load_four(from, 8 * line, columns) & 0x0f0f0f0f,
                   high = load_four(from, 8 * line + 4, columns) & 0x0f0f0f0f;
          to[line * kPanelRows + r] = (low | high << 4) ^ (has_minimums(w) ? 0 : 0x88888888);
        }
      else if (w.kind == IP_INT6)
        for (int64_t line = 0, c = 0; line < lines; line += kSixBitLines, c += kSixBitColumns) {
          const uint32_t fours[4] = {load_four(from, c, columns), load_four(from, c + 4, columns),
                                     load_four(from, c + 8, columns), load_four(from, c + 12, columns)};
          missing |= !pack_six_bits(fours, to + line * kPanelRows + r);
        }
      else if (w.kind == IP_MXFP4)
        for (int64_t line = 0; line < lines; line++) {
          uint32_t low = nibbles.look_up(load_four(from, 8 * line, columns), missing),
                   high = nibbles.look_up(load_four(from, 8 * line + 4, columns), missing);
          to[line * kPanelRows + r] = low | high << 4;
        }
      else
        for (int64_t line = 0; line < lines; line++)
          to[line * kPanelRows + r] = load_four(from, 4 * line, columns) ^ 0x80808080;
    }
  }
  return !missing;
}

}  // namespace
