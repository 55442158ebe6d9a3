/* depthwise_simd_loops: the loops of depthwise_simd.h for one instruction set and one summed-in type. Included many
 * times by depthwise_simd_set.h, which defines, and undefines, besides what it is given itself:
 *
 *   HC_NAME(x)   x with a suffix of this set's and type's own
 *   HC_PACKED    float or double
 *   HC_LANES     numbers in a vector
 *   HC_FMA(a, b, c)  a * b + c of vectors
 */

/* As aligned as its elements are: columns start anywhere. */
typedef HC_PACKED HC_NAME(vector)
    __attribute__((vector_size(sizeof(HC_PACKED) * HC_LANES), aligned(sizeof(HC_PACKED)), may_alias));

/* `width` columns, whose sums stay in registers: it and, where it can be, `step` are constants at every call. */
HC_TARGET static inline __attribute__((always_inline)) void HC_NAME(columns)(
    const int width, const HC_PACKED *source, const int64_t *offsets, const HC_PACKED *weights, int64_t ntaps,
    const int64_t step, const HC_PACKED *first, HC_PACKED *out, int64_t out_step) {
  HC_NAME(vector) sums[HC_COLUMNS];
#pragma GCC unroll 16
  for (int x = 0; x < width; ++x) {
    sums[x] = HC_AT(first);
  }
  for (int64_t t = 0; t < ntaps; ++t) {
    const HC_PACKED *from = source + offsets[t];
    const HC_NAME(vector) weight = HC_AT(weights + t * HC_LANES);
#pragma GCC unroll 16
    for (int x = 0; x < width; ++x) {
      sums[x] = HC_FMA(weight, HC_AT(from + x * step), sums[x]);
    }
  }
#pragma GCC unroll 16
  for (int x = 0; x < width; ++x) {
    *(HC_NAME(vector) *)(out + x * out_step) = sums[x];
  }
}

#define HC_RUN(width, step)                                                                   \
  for (; count >= (width); count -= (width)) {                                                \
    HC_NAME(columns)((width), source, offsets, weights, ntaps, (step), first, out, out_step); \
    source += (width) * (step);                                                               \
    out += (width) * out_step;                                                                \
  }

HC_TARGET static void HC_NAME(correlate)(const void *source_, const int64_t *offsets, const void *weights_,
                                         int64_t ntaps, int64_t step, int64_t count, const void *first_,
                                         void *out_, int64_t out_step) {
  const HC_PACKED *source = source_, *weights = weights_, *first = first_;
  HC_PACKED *out = out_;
  if (step == HC_LANES) {
    HC_RUN(HC_COLUMNS, HC_LANES)
#if HC_COLUMNS > 8
    HC_RUN(8, HC_LANES)
#endif
    HC_RUN(4, HC_LANES)
    HC_RUN(2, HC_LANES)
    HC_RUN(1, HC_LANES)
  } else {
    HC_RUN(8, step)
    HC_RUN(4, step)
    HC_RUN(2, step)
    HC_RUN(1, step)
  }
}
#undef HC_RUN

/* `width` taps, whose sums stay in registers. */
HC_TARGET static inline __attribute__((always_inline)) void HC_NAME(taps)(
    const int width, const HC_PACKED *source, const int64_t *offsets, const int64_t step, int64_t row,
    const HC_PACKED *grad, int64_t grad_row, int64_t nrows, int64_t count, HC_PACKED *into) {
  HC_NAME(vector) sums[10];
#pragma GCC unroll 16
  for (int t = 0; t < width; ++t) {
    sums[t] = HC_AT(into + t * HC_LANES);
  }
  for (int64_t r = 0; r < nrows; ++r) {
    const HC_PACKED *from[10];
#pragma GCC unroll 16
    for (int t = 0; t < width; ++t) {
      from[t] = source + r * row + offsets[t];
    }
    const HC_PACKED *of = grad + r * grad_row;
    for (int64_t x = 0; x < count; ++x) {
      const HC_NAME(vector) g = HC_AT(of + x * HC_LANES);
#pragma GCC unroll 16
      for (int t = 0; t < width; ++t) {
        sums[t] = HC_FMA(g, HC_AT(from[t] + x * step), sums[t]);
      }
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < width; ++t) {
    *(HC_NAME(vector) *)(into + t * HC_LANES) = sums[t];
  }
}

#define HC_CASE(width)                                                                            \
  case (width):                                                                                   \
    if (step == HC_LANES) {                                                                       \
      HC_NAME(taps)((width), source, offsets, HC_LANES, row, grad, grad_row, nrows, count, sums); \
    } else {                                                                                      \
      HC_NAME(taps)((width), source, offsets, step, row, grad, grad_row, nrows, count, sums);     \
    }                                                                                             \
    break;

HC_TARGET static void HC_NAME(reduce)(const void *source_, const int64_t *offsets, int64_t ntaps,
                                      int64_t step, int64_t row, const void *grad_, int64_t grad_row,
                                      int64_t nrows, int64_t count, void *sums_) {
  const HC_PACKED *source = source_, *grad = grad_;
  HC_PACKED *sums = sums_;
  /* Groups of one size, or two: a small last one would wait for its own sums. */
  for (int64_t groups = (ntaps + 9) / 10; groups > 0; --groups) {
    const int64_t width = (ntaps + groups - 1) / groups;
    switch (width) {
      HC_CASE(1)
      HC_CASE(2)
      HC_CASE(3)
      HC_CASE(4)
      HC_CASE(5)
      HC_CASE(6)
      HC_CASE(7)
      HC_CASE(8)
      HC_CASE(9)
      HC_CASE(10)
    default: /* groups are of at most ten */
      break;
    }
    offsets += width;
    sums += width * HC_LANES;
    ntaps -= width;
  }
}
#undef HC_CASE

HC_TARGET static void HC_NAME(flush)(void *sums_, double *totals, int64_t count) {
  HC_PACKED *sums = sums_;
  for (int64_t i = 0; i < count; ++i) {
    totals[i] += (double)sums[i];
    sums[i] = 0;
  }
}
