/* depthwise_simd_rows: the loops over several rows at once, beside depthwise_simd_loops.h: where a row of taps reads the
 * rows that its neighbours do. Then a vector of the source, once loaded, serves several rows of outputs. That matters
 * because a load that begins anywhere is, with the widest vectors, two loads of the first-level cache. Included
 * beside it, with the same macros.
 */

/* One row of the source, which the outputs [lo, hi) of a block read. weights: those that output 0 multiplies it by; last:
 * where the last vector is, over the one before it where a row of outputs is not whole vectors. */
HC_TARGET static inline __attribute__((always_inline)) void HC_NAME(block_row)(
    const int width, const int lo, const int hi, const HC_PACKED *source, const int64_t *offsets,
    const HC_PACKED *weights, int64_t ntaps, int64_t last, HC_NAME(vector) * sums) {
  for (int64_t t = 0; t < ntaps; ++t) {
    const HC_PACKED *from = source + offsets[t];
    HC_NAME(vector) values[4];
#pragma GCC unroll 4
    for (int x = 0; x < width; ++x) {
      values[x] = HC_AT(from + (x < width - 1 ? x * HC_LANES : last));
      HC_KEEP(values[x]);
    }
#pragma GCC unroll 4
    for (int i = lo; i < hi; ++i) {
      const HC_NAME(vector) weight = HC_AT(weights + (t - i * ntaps) * HC_LANES);
#pragma GCC unroll 4
      for (int x = 0; x < width; ++x) {
        sums[i * 4 + x] = HC_FMA(weight, values[x], sums[i * 4 + x]);
      }
    }
  }
}

/* `rows` x `width` vectors of outputs, whose sums stay in registers. Each is summed in the order of its taps. */
HC_TARGET static inline __attribute__((always_inline)) void HC_NAME(block)(
    const int rows, const int width, const HC_PACKED *source, int64_t row, const int64_t *offsets,
    const HC_PACKED *weights, int64_t height, int64_t ntaps, int64_t last, const HC_PACKED *first,
    HC_PACKED *out, int64_t out_row) {
  HC_NAME(vector) sums[16];
  const int64_t next = ntaps * HC_LANES; /* a row of taps */
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    sums[i] = HC_AT(first);
  }
#define HC_BLOCK_ROW(r, lo, hi) \
  HC_NAME(block_row)(width, (lo), (hi), source + (r) * row, offsets, weights + (r) * next, ntaps, last, sums)
  if (rows > 1) {
    HC_BLOCK_ROW(0, 0, 1);
  }
  if (rows > 2) {
    HC_BLOCK_ROW(1, 0, 2);
  }
  if (rows > 3) {
    HC_BLOCK_ROW(2, 0, 3);
  }
  for (int64_t r = rows - 1; r < height; ++r) {
    HC_BLOCK_ROW(r, 0, rows);
  }
  if (rows > 1) {
    HC_BLOCK_ROW(height, 1, rows);
  }
  if (rows > 2) {
    HC_BLOCK_ROW(height + 1, 2, rows);
  }
  if (rows > 3) {
    HC_BLOCK_ROW(height + 2, 3, rows);
  }
#undef HC_BLOCK_ROW
#pragma GCC unroll 4
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int x = 0; x < width; ++x) {
      *(HC_NAME(vector) *)(out + i * out_row + (x < width - 1 ? x * HC_LANES : last)) = sums[i * 4 + x];
    }
  }
}

#define HC_ACROSS(rows, width)                                                        \
  for (; columns - x > ((width) - 1) * HC_LANES; x += (width) * HC_LANES) {           \
    const int64_t whole = ((width) - 1) * HC_LANES, rest = columns - x - HC_LANES;    \
    HC_NAME(block)((rows), (width), source + x, row, offsets, weights, height, ntaps, \
                   whole < rest ? whole : rest, first, out + x, out_row);             \
  }
#define HC_DOWN(rows)                                                      \
  for (; height >= (rows) && nrows >= (rows);                              \
       nrows -= (rows), source += (rows) * row, out += (rows) * out_row) { \
    int64_t x = 0;                                                         \
    HC_ACROSS(rows, 4)                                                     \
    HC_ACROSS(rows, 3)                                                     \
    HC_ACROSS(rows, 2)                                                     \
    HC_ACROSS(rows, 1)                                                     \
  }

HC_TARGET static void HC_NAME(correlate_rows)(const void *source_, int64_t row, const int64_t *offsets,
                                              const void *weights_, int64_t height, int64_t ntaps,
                                              int64_t nrows, int64_t columns, const void *first_, void *out_,
                                              int64_t out_row) {
  const HC_PACKED *source = source_, *weights = weights_, *first = first_;
  HC_PACKED *out = out_;
#if HC_ROWS > 2
  HC_DOWN(4)
  HC_DOWN(3)
#endif
  HC_DOWN(2)
  HC_DOWN(1)
}
#undef HC_DOWN
#undef HC_ACROSS

/* `height` rows of `width` adjacent taps, whose sums stay in registers. */
HC_TARGET static inline __attribute__((always_inline)) void HC_NAME(grid)(
    const int height, const int width, const HC_PACKED *source, int64_t row, const HC_PACKED *grad,
    int64_t grad_row, int64_t back, int64_t nrows, int64_t count, HC_PACKED *into, int64_t into_row) {
  HC_NAME(vector) sums[3 * HC_TAPS];
#pragma GCC unroll 3
  for (int k = 0; k < height; ++k) {
#pragma GCC unroll 8
    for (int t = 0; t < width; ++t) {
      sums[k * HC_TAPS + t] = HC_AT(into + k * into_row + t * HC_LANES);
    }
  }
  for (int64_t r = 0; r < nrows; ++r) {
    const HC_PACKED *from = source + r * row, *of = grad + r * grad_row;
    for (int64_t x = 0; x < count; ++x) {
      HC_NAME(vector) g[3];
#pragma GCC unroll 3
      for (int k = 0; k < height; ++k) {
        g[k] = HC_AT(of + x * HC_LANES - k * back);
      }
#pragma GCC unroll 8
      for (int t = 0; t < width; ++t) {
        HC_NAME(vector) value = HC_AT(from + x * HC_LANES + t);
        HC_KEEP(value);
#pragma GCC unroll 3
        for (int k = 0; k < height; ++k) {
          sums[k * HC_TAPS + t] = HC_FMA(g[k], value, sums[k * HC_TAPS + t]);
        }
      }
    }
  }
#pragma GCC unroll 3
  for (int k = 0; k < height; ++k) {
#pragma GCC unroll 8
    for (int t = 0; t < width; ++t) {
      *(HC_NAME(vector) *)(into + k * into_row + t * HC_LANES) = sums[k * HC_TAPS + t];
    }
  }
}

#define HC_GRID(height, width)                                                                         \
  case (height) * 8 + (width):                                                                         \
    HC_NAME(grid)((height), (width), source, row, grad, grad_row, back, nrows, count, into, into_row); \
    break;
#define HC_GRIDS(height) HC_GRID(height, 1) HC_GRID(height, 2) HC_GRID(height, 3) HC_GRID(height, 4)

HC_TARGET static void HC_NAME(choose_grid)(int64_t height, int64_t width, const HC_PACKED *source,
                                           int64_t row, const HC_PACKED *grad, int64_t grad_row, int64_t back,
                                           int64_t nrows, int64_t count, HC_PACKED *into, int64_t into_row) {
  switch (height * 8 + width) {
    HC_GRIDS(1)
    HC_GRIDS(2)
    HC_GRIDS(3)
#if HC_TAPS > 4
    HC_GRID(1, 5)
    HC_GRID(1, 6)
    HC_GRID(1, 7)
    HC_GRID(2, 5)
    HC_GRID(2, 6)
    HC_GRID(2, 7)
    HC_GRID(3, 5)
    HC_GRID(3, 6)
    HC_GRID(3, 7)
#endif
  default: /* there are no others */
    break;
  }
}
#undef HC_GRID
#undef HC_GRIDS

HC_TARGET static void HC_NAME(reduce_rows)(const void *source_, int64_t row, int64_t height, int64_t ntaps,
                                           int64_t apart, const void *grad_, int64_t grad_row, int64_t nrows,
                                           int64_t count, void *sums_) {
  const int64_t tall = nrows >= 2 * apart ? 3 : 1, back = apart * grad_row, into_row = ntaps * HC_LANES;
  const int64_t nwide = (ntaps + HC_TAPS - 1) / HC_TAPS;
  int64_t k = 0;
  for (int64_t ntall = (height + tall - 1) / tall; ntall > 0; --ntall) {
    const int64_t h = (height - k + ntall - 1) / ntall; /* taps' rows k to k + h */
    for (int64_t i = 0; i < nwide; ++i) {
      const int64_t t = i * ntaps / nwide, width = (i + 1) * ntaps / nwide - t;
      const HC_PACKED *source = (const HC_PACKED *)source_ + k * apart * row + t, *grad = grad_;
      HC_PACKED *into = (HC_PACKED *)sums_ + (k * ntaps + t) * HC_LANES;
      /* Rows of the source that only the first taps' rows reach, that all do, and that only the last ones do. */
      for (int64_t j = 1; j < h; ++j) {
        HC_NAME(choose_grid)(j, width, source + (j - 1) * apart * row, row, grad + (j - 1) * back, grad_row,
                             back, apart, count, into, into_row);
      }
      HC_NAME(choose_grid)(h, width, source + (h - 1) * apart * row, row, grad + (h - 1) * back, grad_row,
                           back, nrows - (h - 1) * apart, count, into, into_row);
      for (int64_t j = 1; j < h; ++j) {
        HC_NAME(choose_grid)(h - j, width, source + (nrows + (j - 1) * apart) * row, row,
                             grad + nrows * grad_row - back, grad_row, back, apart, count,
                             into + j * into_row, into_row);
      }
    }
    k += h;
  }
}

/* totals[t] += the sum of the lanes of sums[t]; sums = 0 */
HC_TARGET static void HC_NAME(flush_lanes)(void *sums_, double *totals, int64_t ntaps) {
  HC_PACKED *sums = sums_;
  for (int64_t t = 0; t < ntaps; ++t, sums += HC_LANES) {
    double lanes[HC_LANES];
    for (int i = 0; i < HC_LANES; ++i) {
      lanes[i] = (double)sums[i];
      sums[i] = 0;
    }
#pragma GCC unroll 4
    for (int half = HC_LANES / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) {
        lanes[i] += lanes[i + half];
      }
    }
    totals[t] += lanes[0];
  }
}
