/* block: see block.h. */
#include "block.h"

#include <math.h>
#include <string.h>

#include "bfloat16.h"

/* ---- normalising ---- */

static int64_t magnitude(int64_t stride) { return stride < 0 ? -stride : stride; }

/* Whether dimension a of the target is an outer one to dimension b. */
static bool is_outer(int64_t a, int64_t b, const int64_t *target_strides, const int64_t *source_strides) {
  const int64_t target_a = magnitude(target_strides[a]), target_b = magnitude(target_strides[b]);
  return target_a != target_b ? target_a > target_b
                              : magnitude(source_strides[a]) > magnitude(source_strides[b]);
}

enum { LARGEST_NDIM = 16 }; /* of what is given; a tensor's */

bool hc_block_make(void *target, const void *source, int64_t ndim, const int64_t *sizes,
                   const int64_t *target_strides, const int64_t *source_strides, hc_block *block) {
  int64_t order[LARGEST_NDIM], count = 0;
  *block = (hc_block){.target = target, .source = source};
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (sizes[dim] == 1) {
      continue;
    }
    int64_t at = count++; /* insertion keeps the order of equals */
    for (; at > 0 && is_outer(dim, order[at - 1], target_strides, source_strides); --at) {
      order[at] = order[at - 1];
    }
    order[at] = dim;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t dim = order[i], last = block->ndim - 1;
    if (last >= 0 && block->target_strides[last] == sizes[dim] * target_strides[dim] &&
        block->source_strides[last] == sizes[dim] * source_strides[dim]) {
      block->sizes[last] *= sizes[dim];
      block->target_strides[last] = target_strides[dim];
      block->source_strides[last] = source_strides[dim];
      continue;
    }
    if (block->ndim == HC_BLOCK_DIMS) {
      return false;
    }
    block->sizes[block->ndim] = sizes[dim];
    block->target_strides[block->ndim] = target_strides[dim];
    block->source_strides[block->ndim] = source_strides[dim];
    ++block->ndim;
  }
  return true;
}

int64_t hc_block_numel(const hc_block *block) {
  int64_t numel = 1;
  for (int64_t dim = 0; dim < block->ndim; ++dim) {
    numel *= block->sizes[dim];
  }
  return numel;
}

hc_block hc_block_rows(const hc_block *block, int64_t element_size, int64_t begin, int64_t end) {
  hc_block rows = *block;
  if (block->ndim > 0) {
    rows.sizes[0] = end - begin;
    rows.target = (char *)block->target + begin * block->target_strides[0] * element_size;
    rows.source = (const char *)block->source + begin * block->source_strides[0] * element_size;
  }
  return rows;
}

/* ---- planes: the two innermost dimensions ---- */

typedef struct plane {
  int64_t rows, columns;
  int64_t target_row, source_row, target_column, source_column; /* strides */
} plane;

typedef struct sixteen { /* complex double */
  uint64_t halves[2];
} sixteen;

/* Short rows are what a halo of a contiguous tensor consists of: of a known length they are a few moves each. */
#define SHORT_ROWS(type, n)                                     \
  case n:                                                       \
    for (int64_t row = 0; row < p->rows; ++row) {               \
      const type *restrict from = source + row * p->source_row; \
      type *restrict to = target + row * p->target_row;         \
      for (int column = 0; column < (n); ++column) {            \
        to[column] = from[column];                              \
      }                                                         \
    }                                                           \
    break;

#define COPY_PLANE(name, type)                                                     \
  static void name(void *target_bytes, const void *source_bytes, const plane *p) { \
    type *target = target_bytes;                                                   \
    const type *source = source_bytes;                                             \
    if (p->target_column == 1 && p->source_column == 1) {                          \
      switch (p->columns) {                                                        \
        SHORT_ROWS(type, 1)                                                        \
        SHORT_ROWS(type, 2)                                                        \
        SHORT_ROWS(type, 3)                                                        \
        SHORT_ROWS(type, 4)                                                        \
      default:                                                                     \
        for (int64_t row = 0; row < p->rows; ++row) {                              \
          memcpy(target + row * p->target_row, source + row * p->source_row,       \
                 (size_t)p->columns * sizeof *target);                             \
        }                                                                          \
      }                                                                            \
      return;                                                                      \
    }                                                                              \
    for (int64_t row = 0; row < p->rows; ++row) {                                  \
      for (int64_t column = 0; column < p->columns; ++column) {                    \
        target[row * p->target_row + column * p->target_column] =                  \
            source[row * p->source_row + column * p->source_column];               \
      }                                                                            \
    }                                                                              \
  }

COPY_PLANE(copy_1, uint8_t)
COPY_PLANE(copy_2, uint16_t)
COPY_PLANE(copy_4, uint32_t)
COPY_PLANE(copy_8, uint64_t)
COPY_PLANE(copy_16, sixteen)

static double plus_float64(double a, double b) { return a + b; }

static float plus_float32(float a, float b) { return a + b; }

static uint16_t plus_bfloat16(uint16_t a, uint16_t b) {
  return hc_to_bfloat16(hc_from_bfloat16(a) + hc_from_bfloat16(b));
}

static float from_float16(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
  const int exponent = (bits >> 10) & 0x1f;
  const int fraction = bits & 0x3ff;
  float value;
  if (exponent == 0x1f) {
    value = fraction == 0 ? INFINITY : NAN;
  } else if (exponent == 0) {
    value = ldexpf((float)fraction, -24);
  } else {
    value = ldexpf((float)(fraction + 0x400), exponent - 25);
  }
  return sign != 0 ? -value : value;
}

static uint16_t to_float16(float value) {
  const uint16_t sign = signbit(value) ? 0x8000 : 0;
  const float size = fabsf(value);
  if (isnan(value)) {
    return 0x7e00;
  }
  if (size >= 65520.0F) { /* half a step above the largest rounds up */
    return sign | 0x7c00;
  }
  int exponent = 0;
  (void)frexpf(size, &exponent); /* size = f 2^exponent, f in [1/2, 1) */
  exponent = exponent < -13 ? -13 : exponent;
  /* In units of the last place: 11 bits of fraction, or fewer where it is subnormal. Ties go to even. */
  const long units = lrintf(ldexpf(size, 11 - exponent));
  /* A fraction that rounds up to 2^11 carries into the exponent by itself. */
  return (uint16_t)(sign | (units < 0x400 ? units : units + ((long)(exponent + 13) << 10)));
}

static uint16_t plus_float16(uint16_t a, uint16_t b) { return to_float16(from_float16(a) + from_float16(b)); }

bool hc_element_from(double number, hc_element element, void *bytes) {
  const float single = (float)number; /* 16-bit numbers are rounded twice, as ATen does it */
  uint16_t half = 0;
  switch (element) {
  case HC_ELEMENT_FLOAT64:
    memcpy(bytes, &number, sizeof number);
    return true;
  case HC_ELEMENT_FLOAT32:
    memcpy(bytes, &single, sizeof single);
    return true;
  case HC_ELEMENT_FLOAT16:
    half = to_float16(single);
    break;
  case HC_ELEMENT_BFLOAT16:
    half = hc_to_bfloat16(single);
    break;
  default:
    return false;
  }
  memcpy(bytes, &half, sizeof half);
  return true;
}

#define ADD_PLANE(name, type, plus)                                                \
  static void name(void *target_bytes, const void *source_bytes, const plane *p) { \
    type *target = target_bytes;                                                   \
    const type *source = source_bytes;                                             \
    for (int64_t row = 0; row < p->rows; ++row) {                                  \
      type *to = target + row * p->target_row;                                     \
      const type *from = source + row * p->source_row;                             \
      for (int64_t column = 0; column < p->columns; ++column) {                    \
        to[column * p->target_column] =                                            \
            plus(to[column * p->target_column], from[column * p->source_column]);  \
      }                                                                            \
    }                                                                              \
  }

ADD_PLANE(add_float64, double, plus_float64)
ADD_PLANE(add_float32, float, plus_float32)
ADD_PLANE(add_float16, uint16_t, plus_float16)
ADD_PLANE(add_bfloat16, uint16_t, plus_bfloat16)

/* ---- blocks: all planes ---- */

typedef void (*plane_fn)(void *, const void *, const plane *);

static void each_plane(const hc_block *block, int64_t element_size, plane_fn run) {
  plane p = {1, 1, 0, 0, 1, 1};
  const int64_t outer = block->ndim > 2 ? block->ndim - 2 : 0;
  int64_t index[HC_BLOCK_DIMS] = {0};
  char *target = block->target;
  const char *source = block->source;
  if (block->ndim >= 1) {
    p.columns = block->sizes[block->ndim - 1];
    p.target_column = block->target_strides[block->ndim - 1];
    p.source_column = block->source_strides[block->ndim - 1];
  }
  if (block->ndim >= 2) {
    p.rows = block->sizes[block->ndim - 2];
    p.target_row = block->target_strides[block->ndim - 2];
    p.source_row = block->source_strides[block->ndim - 2];
  }
  for (;;) {
    run(target, source, &p);
    int64_t dim = outer - 1;
    for (; dim >= 0; --dim) {
      target += block->target_strides[dim] * element_size;
      source += block->source_strides[dim] * element_size;
      if (++index[dim] < block->sizes[dim]) {
        break;
      }
      target -= block->sizes[dim] * block->target_strides[dim] * element_size;
      source -= block->sizes[dim] * block->source_strides[dim] * element_size;
      index[dim] = 0;
    }
    if (dim < 0) {
      return;
    }
  }
}

void hc_block_copy(const hc_block *block, int64_t element_size) {
  each_plane(block, element_size,
             element_size == 1   ? copy_1
             : element_size == 2 ? copy_2
             : element_size == 4 ? copy_4
             : element_size == 8 ? copy_8
                                 : copy_16);
}

void hc_block_add(const hc_block *block, hc_element element) {
  switch (element) {
  case HC_ELEMENT_FLOAT64:
    each_plane(block, 8, add_float64);
    break;
  case HC_ELEMENT_FLOAT32:
    each_plane(block, 4, add_float32);
    break;
  case HC_ELEMENT_FLOAT16:
    each_plane(block, 2, add_float16);
    break;
  case HC_ELEMENT_BFLOAT16:
    each_plane(block, 2, add_bfloat16);
    break;
  case HC_ELEMENT_OTHER: /* the caller's mistake */
    break;
  }
}
