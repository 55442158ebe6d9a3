/* block_body: what one thread of a kernel does. Compiles as CUDA and as C11.
 *
 * A span is a block made ready for the device: its dimensions are counted in units of 1 to 16 bytes, the widest that
 * sizes, strides and addresses allow, so that one load and one store move a unit and no row has a rest. A thread takes
 * every `step`-th unit of a span from `first` on. Where a unit lies follows from its number by dividing by the sizes,
 * innermost first; the divisions are multiplications (hc_divider). Numbers fit in 31 bits (block_launch.h cuts what
 * does not), addresses need all 64.
 *
 * HC_UNROLL units are loaded before the first is stored, since a thread that waits for each load would leave most of
 * the memory's bandwidth unused.
 *
 * HC_BODY's functions are inlined with a constant width, so that a unit lives in registers.
 */
#ifndef HC_BLOCK_BODY_H
#define HC_BLOCK_BODY_H

#include <stdint.h>

#include "../csrc/block.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define HC_BODY         static __device__ __forceinline__
#define HC_ALIGNED(n)   __align__(n)
#define HC_UNROLLED     _Pragma("unroll")
#define HC_NOT_UNROLLED _Pragma("unroll 1")
#else
#include <string.h>
#define HC_BODY       static inline __attribute__((always_inline))
#define HC_ALIGNED(n) __attribute__((aligned(n), may_alias))
#define HC_UNROLLED
#define HC_NOT_UNROLLED
#endif

enum {
  HC_SPAN_DIMS = HC_BLOCK_DIMS + 1, /* one more for an element that is cut into several units */
  HC_UNROLL = 4,
};

/* n / d for n < 2^31: (n * magic / 2^32 + n) / 2^shift. */
typedef struct hc_divider {
  uint32_t divisor, magic, shift;
} hc_divider;

typedef struct hc_span {
  char *target;
  const char *source;                                                 /* NULL: the launch's fill */
  int64_t target_strides[HC_SPAN_DIMS], source_strides[HC_SPAN_DIMS]; /* in bytes */
  hc_divider sizes[HC_SPAN_DIMS - 1]; /* of dimension 1 on: the outermost needs none */
  uint32_t units;                     /* how many there are, below 2^31 */
  int16_t ndim;
  int16_t width; /* bytes of a unit: 1, 2, 4, 8 or 16 */
} hc_span;

/* Up to 16 bytes in registers, the first in the lowest bits of word[0]. */
typedef struct hc_unit {
  uint32_t word[4];
} hc_unit;

/* What memory is read and written as. */
typedef struct HC_ALIGNED(16) hc_memory16 {
  uint32_t x, y, z, w;
} hc_memory16;
typedef struct HC_ALIGNED(8) hc_memory8 {
  uint32_t x, y;
} hc_memory8;
typedef struct HC_ALIGNED(4) hc_memory4 {
  uint32_t x;
} hc_memory4;
typedef struct HC_ALIGNED(2) hc_memory2 {
  uint16_t x;
} hc_memory2;

HC_BODY uint32_t hc_high_product(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  return __umulhi(a, b);
#else
  return (uint32_t)(((uint64_t)a * b) >> 32);
#endif
}

HC_BODY uint32_t hc_divide(uint32_t number, hc_divider by) {
  return (hc_high_product(number, by.magic) + number) >> by.shift;
}

/* ---- a unit ---- */

HC_BODY hc_unit hc_unit_load(const char *from, int width) {
  hc_unit unit = {{0, 0, 0, 0}};
  switch (width) {
  case 16: {
    const hc_memory16 memory = *(const hc_memory16 *)from;
    unit.word[0] = memory.x, unit.word[1] = memory.y, unit.word[2] = memory.z, unit.word[3] = memory.w;
    break;
  }
  case 8: {
    const hc_memory8 memory = *(const hc_memory8 *)from;
    unit.word[0] = memory.x, unit.word[1] = memory.y;
    break;
  }
  case 4:
    unit.word[0] = ((const hc_memory4 *)from)->x;
    break;
  case 2:
    unit.word[0] = ((const hc_memory2 *)from)->x;
    break;
  default:
    unit.word[0] = *(const unsigned char *)from;
    break;
  }
  return unit;
}

HC_BODY void hc_unit_store(char *to, hc_unit unit, int width) {
  switch (width) {
  case 16: {
    const hc_memory16 memory = {unit.word[0], unit.word[1], unit.word[2], unit.word[3]};
    *(hc_memory16 *)to = memory;
    break;
  }
  case 8: {
    const hc_memory8 memory = {unit.word[0], unit.word[1]};
    *(hc_memory8 *)to = memory;
    break;
  }
  case 4:
    ((hc_memory4 *)to)->x = unit.word[0];
    break;
  case 2:
    ((hc_memory2 *)to)->x = (uint16_t)unit.word[0];
    break;
  default:
    *(unsigned char *)to = (unsigned char)unit.word[0];
    break;
  }
}

/* ---- adding ---- */

#ifdef __CUDACC__

HC_BODY uint32_t hc_sum_float32(uint32_t a, uint32_t b) {
  return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
}

HC_BODY uint64_t hc_sum_float64(uint64_t a, uint64_t b) {
  return (uint64_t)__double_as_longlong(__longlong_as_double((long long)a) +
                                        __longlong_as_double((long long)b));
}

HC_BODY uint16_t hc_sum_float16(uint16_t a, uint16_t b) {
  return __half_as_ushort(
      __float2half_rn(__half2float(__ushort_as_half(a)) + __half2float(__ushort_as_half(b))));
}

HC_BODY uint16_t hc_sum_bfloat16(uint16_t a, uint16_t b) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(__bfloat162float(__ushort_as_bfloat16(a)) +
                                                  __bfloat162float(__ushort_as_bfloat16(b))));
}

#else

HC_BODY uint32_t hc_sum_float32(uint32_t a, uint32_t b) {
  float x, y;
  memcpy(&x, &a, sizeof x);
  memcpy(&y, &b, sizeof y);
  x += y;
  memcpy(&a, &x, sizeof a);
  return a;
}

HC_BODY uint64_t hc_sum_float64(uint64_t a, uint64_t b) {
  double x, y;
  memcpy(&x, &a, sizeof x);
  memcpy(&y, &b, sizeof y);
  x += y;
  memcpy(&a, &x, sizeof a);
  return a;
}

HC_BODY uint16_t hc_sum_float16(uint16_t a, uint16_t b) {
  _Float16 x, y;
  memcpy(&x, &a, sizeof x);
  memcpy(&y, &b, sizeof y);
  x = (_Float16)((float)x + (float)y);
  memcpy(&a, &x, sizeof a);
  return a;
}

/* The nearest bfloat16, the even one of two; a NaN stays one. */
HC_BODY uint16_t hc_sum_bfloat16(uint16_t a, uint16_t b) {
  const uint32_t sum = hc_sum_float32((uint32_t)a << 16, (uint32_t)b << 16);
  if ((sum & 0x7fffffff) > 0x7f800000) {
    return 0x7fff;
  }
  return (uint16_t)((sum + 0x7fff + ((sum >> 16) & 1)) >> 16);
}

#endif

/* Both 16-bit halves of a word. */
HC_BODY uint32_t hc_sum_halves(uint32_t a, uint32_t b, hc_element element) {
  const uint16_t low_a = (uint16_t)a, low_b = (uint16_t)b;
  const uint16_t high_a = (uint16_t)(a >> 16), high_b = (uint16_t)(b >> 16);
  const bool is_half = element == HC_ELEMENT_FLOAT16;
  const uint32_t low = is_half ? hc_sum_float16(low_a, low_b) : hc_sum_bfloat16(low_a, low_b);
  const uint32_t high = is_half ? hc_sum_float16(high_a, high_b) : hc_sum_bfloat16(high_a, high_b);
  return low | high << 16;
}

/* The elements of two units, added one by one. What a unit narrower than a word does not use is zero, and 0 + 0. */
HC_BODY hc_unit hc_unit_sum(hc_unit a, hc_unit b, hc_element element, int width) {
  hc_unit sum = {{0, 0, 0, 0}};
  const int words = width <= 4 ? 1 : width / 4;
  if (element == HC_ELEMENT_FLOAT64) {
    for (int i = 0; i + 1 < words; i += 2) {
      const uint64_t bits = hc_sum_float64(a.word[i] | (uint64_t)a.word[i + 1] << 32,
                                           b.word[i] | (uint64_t)b.word[i + 1] << 32);
      sum.word[i] = (uint32_t)bits;
      sum.word[i + 1] = (uint32_t)(bits >> 32);
    }
    return sum;
  }
  for (int i = 0; i < words; ++i) {
    sum.word[i] = element == HC_ELEMENT_FLOAT32 ? hc_sum_float32(a.word[i], b.word[i])
                                                : hc_sum_halves(a.word[i], b.word[i], element);
  }
  return sum;
}

/* ---- a span ---- */

/* Moves the units `begin`, `begin + step`, ..., `count` of them. `count` and `width` are constants. */
HC_BODY void hc_span_move(const hc_span *span, hc_unit fill, hc_element element, int width, int count,
                          uint32_t begin, uint32_t step) {
  uint32_t numbers[HC_UNROLL];
  int64_t targets[HC_UNROLL], sources[HC_UNROLL]; /* in bytes from the span's first */
  hc_unit units[HC_UNROLL];
  HC_UNROLLED for (int i = 0; i < count; ++i) {
    numbers[i] = begin + (uint32_t)i * step;
    targets[i] = 0;
    sources[i] = 0;
  }
  HC_NOT_UNROLLED for (int dim = span->ndim - 1; dim > 0; --dim) {
    const hc_divider size = span->sizes[dim - 1];
    const int64_t target_stride = span->target_strides[dim], source_stride = span->source_strides[dim];
    HC_UNROLLED for (int i = 0; i < count; ++i) {
      const uint32_t quotient = hc_divide(numbers[i], size);
      const int32_t index = (int32_t)(numbers[i] - quotient * size.divisor);
      targets[i] += index * target_stride;
      sources[i] += index * source_stride;
      numbers[i] = quotient;
    }
  }
  HC_UNROLLED for (int i = 0; i < count; ++i) {
    targets[i] += (int32_t)numbers[i] * span->target_strides[0];
    sources[i] += (int32_t)numbers[i] * span->source_strides[0];
  }
  if (span->source != NULL) {
    HC_UNROLLED for (int i = 0; i < count; ++i) { units[i] = hc_unit_load(span->source + sources[i], width); }
  } else {
    HC_UNROLLED for (int i = 0; i < count; ++i) { units[i] = fill; }
  }
  if (element != HC_ELEMENT_OTHER) {
    hc_unit sums[HC_UNROLL];
    HC_UNROLLED for (int i = 0; i < count; ++i) { sums[i] = hc_unit_load(span->target + targets[i], width); }
    HC_UNROLLED for (int i = 0; i < count; ++i) { units[i] = hc_unit_sum(sums[i], units[i], element, width); }
  }
  HC_UNROLLED for (int i = 0; i < count; ++i) { hc_unit_store(span->target + targets[i], units[i], width); }
}

HC_BODY void hc_span_walk(const hc_span *span, hc_unit fill, hc_element element, int width, uint32_t first,
                          uint32_t step) {
  uint32_t begin = first;
  for (; begin + (HC_UNROLL - 1) * step < span->units; begin += HC_UNROLL * step) {
    hc_span_move(span, fill, element, width, HC_UNROLL, begin, step);
  }
  for (; begin < span->units; begin += step) {
    hc_span_move(span, fill, element, width, 1, begin, step);
  }
}

/* What thread `first` of `step` does. `first` and HC_UNROLL * `step` are below 2^30: nothing overflows. */
HC_BODY void hc_span_run(const hc_span *span, hc_unit fill, hc_element element, uint32_t first,
                         uint32_t step) {
  switch (span->width) {
  case 16:
    hc_span_walk(span, fill, element, 16, first, step);
    break;
  case 8:
    hc_span_walk(span, fill, element, 8, first, step);
    break;
  case 4:
    hc_span_walk(span, fill, element, 4, first, step);
    break;
  case 2:
    hc_span_walk(span, fill, element, 2, first, step);
    break;
  default:
    hc_span_walk(span, fill, element, 1, first, step);
    break;
  }
}

#endif
