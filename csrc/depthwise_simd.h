/* depthwise_simd: the inner loops of depthwise.c, for the instruction sets that one binary may meet.
 *
 * The loops are written once, in depthwise_simd_loops.h, with vectors of `lanes` numbers of the type that is summed in,
 * and compiled for several instruction sets; which one runs is looked up in the processor at run time. (Not by
 * target_clones: that needs an ifunc resolver, which runs before AddressSanitizer has started.)
 *
 * Everything here counts elements. "Packed" is the summed-in type, float or double; "stored" is what a tensor holds.
 */
#ifndef HC_DEPTHWISE_SIMD_H
#define HC_DEPTHWISE_SIMD_H

#include <stddef.h>

#include "depthwise.h"

typedef struct hc_simd {
  int64_t lanes;
  size_t packed_size, stored_size;

  /* out[x * out_step + lane] = first[lane] + sum over taps of weights[t * lanes + lane] * source[offsets[t] + x * step
   * + lane], for x < count */
  void (*correlate)(const void *source, const int64_t *offsets, const void *weights, int64_t ntaps,
                    int64_t step, int64_t count, const void *first, void *out, int64_t out_step);
  /* sums[t * lanes + lane] += sum over r < nrows, x < count of grad[r * grad_row + x * lanes + lane] *
   * source[offsets[t] + r * row + x * step + lane] */
  void (*reduce)(const void *source, const int64_t *offsets, int64_t ntaps, int64_t step, int64_t row,
                 const void *grad, int64_t grad_row, int64_t nrows, int64_t count, void *sums);
  /* The same over `nrows` rows, where the taps are `height` rows of `ntaps`, and outputs that are a row apart read
   * sources that are. Lanes are columns, of which there are at least `lanes`.
   *
   * out[i * out_row + x] = first[x % lanes] + sum over k < height, t < ntaps of
   * weights[(k * ntaps + t) * lanes] * source[(i + k) * row + offsets[t] + x], for i < nrows, x < columns */
  void (*correlate_rows)(const void *source, int64_t row, const int64_t *offsets, const void *weights,
                         int64_t height, int64_t ntaps, int64_t nrows, int64_t columns, const void *first,
                         void *out, int64_t out_row);
  /* sums[(k * ntaps + t) * lanes + lane] += sum over r < nrows, x < count of grad[r * grad_row + x * lanes + lane] *
   * source[(r + k * apart) * row + t + x * lanes + lane] */
  void (*reduce_rows)(const void *source, int64_t row, int64_t height, int64_t ntaps, int64_t apart,
                      const void *grad, int64_t grad_row, int64_t nrows, int64_t count, void *sums);
  /* totals[i] += sums[i]; sums[i] = 0, in float64 */
  void (*flush)(void *sums, double *totals, int64_t count);
  /* totals[t] += sum over lanes of sums[t * lanes + lane]; sums = 0, in float64 */
  void (*flush_lanes)(void *sums, double *totals, int64_t ntaps);

  /* Stored to packed: a line of adjacent columns, `step` apart; or pixels of `lanes` channels, zero from `channels` on. */
  void (*pack_line)(const void *from, int64_t step, int64_t count, void *packed);
  /* `nrows` such lines of adjacent columns, from_row apart, each with zeros before and after, `line` numbers in all: no
   * less than `lanes`. */
  void (*pack_lines)(const void *from, int64_t from_row, int64_t nrows, int64_t before, int64_t count,
                     int64_t line, void *packed, int64_t row);
  void (*pack_pixels)(const void *from, int64_t step, int64_t channel_step, int64_t channels, int64_t count,
                      void *packed);
  /* And back. */
  void (*unpack_line)(const void *packed, int64_t count, void *to, int64_t step);
  void (*unpack_pixels)(const void *packed, int64_t count, void *to, int64_t step, int64_t channel_step,
                        int64_t channels);
  /* *stored = value, or *stored + value */
  void (*store)(double value, bool add, void *stored);
} hc_simd;

/* The best set of loops for a dimension of `width` numbers that the lanes go along: fewer lanes for a narrow one. */
const hc_simd *hc_simd_choose(hc_depthwise_dtype dtype, int64_t width);

#endif
