/* depthwise_simd: see depthwise_simd.h. */
#include "depthwise_simd.h"

#include <string.h>

#include "bfloat16.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define HC_AS_IT_IS(value) (value)

#define HC_AT(pointer) (*(const HC_NAME(vector) *)(pointer))

/* A vector that is loaded once and stays in a register: GCC would rather make it an operand of each multiplication, and
 * load it as often. */
#if defined(__x86_64__)
#define HC_KEEP(vector) __asm__("" : "+v"(vector))
#else
#define HC_KEEP(vector) ((void)(vector))
#endif

#ifndef HC_SIMD_BYTES /* of a vector, at most: a test looks at each set on one processor */
#define HC_SIMD_BYTES 64
#endif

/* ---- any processor: vectors of 16 bytes ---- */

#define HC_SET(x) x##_base
#define HC_TARGET
#define HC_BYTES               16
#define HC_COLUMNS             8
#define HC_ROWS                2
#define HC_TAPS                4
#define HC_FMA_FLOAT(a, b, c)  ((a) * (b) + (c))
#define HC_FMA_DOUBLE(a, b, c) ((a) * (b) + (c))
#include "depthwise_simd_set.h"

#if defined(__x86_64__)

/* ---- AVX2: 32 bytes ---- */

#define HC_SET(x)              x##_avx2
#define HC_TARGET              __attribute__((target("avx2,fma")))
#define HC_BYTES               32
#define HC_COLUMNS             8
#define HC_ROWS                2
#define HC_TAPS                4
#define HC_FMA_FLOAT(a, b, c)  (vector_float_avx2) _mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c))
#define HC_FMA_DOUBLE(a, b, c) (vector_double_avx2) _mm256_fmadd_pd((__m256d)(a), (__m256d)(b), (__m256d)(c))
#include "depthwise_simd_set.h"

/* ---- AVX-512: 64 bytes, and twice the registers ---- */

#define HC_SET(x)             x##_avx512
#define HC_TARGET             __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define HC_BYTES              64
#define HC_COLUMNS            16
#define HC_ROWS               4
#define HC_TAPS               7
#define HC_FMA_FLOAT(a, b, c) (vector_float_avx512) _mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c))
#define HC_FMA_DOUBLE(a, b, c) \
  (vector_double_avx512) _mm512_fmadd_pd((__m512d)(a), (__m512d)(b), (__m512d)(c))
#include "depthwise_simd_set.h"

#endif /* __x86_64__ */

/* ---- which ---- */

static int64_t rounded(int64_t width, const hc_simd *simd) {
  return (width + simd->lanes - 1) / simd->lanes * simd->lanes;
}

const hc_simd *hc_simd_choose(hc_depthwise_dtype dtype, int64_t width) {
  static const hc_simd *const base[HC_DEPTHWISE_DTYPES] = {
      [HC_DEPTHWISE_FLOAT32] = &simd_float32_base,
      [HC_DEPTHWISE_FLOAT64] = &simd_float64_base,
      [HC_DEPTHWISE_BFLOAT16] = &simd_bfloat16_base,
  };
  const hc_simd *best = base[dtype];
#if defined(__x86_64__)
  static const hc_simd *const avx2[HC_DEPTHWISE_DTYPES] = {
      [HC_DEPTHWISE_FLOAT32] = &simd_float32_avx2,
      [HC_DEPTHWISE_FLOAT64] = &simd_float64_avx2,
      [HC_DEPTHWISE_BFLOAT16] = &simd_bfloat16_avx2,
  };
  static const hc_simd *const avx512[HC_DEPTHWISE_DTYPES] = {
      [HC_DEPTHWISE_FLOAT32] = &simd_float32_avx512,
      [HC_DEPTHWISE_FLOAT64] = &simd_float64_avx512,
      [HC_DEPTHWISE_BFLOAT16] = &simd_bfloat16_avx512,
  };
  const bool has_avx2 =
      HC_SIMD_BYTES >= 32 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) {
    best = avx2[dtype];
  }
  if (has_avx2 && HC_SIMD_BYTES >= 64 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") &&
      rounded(width, avx512[dtype]) <
          2 * rounded(width, best)) { /* half the instructions, unless half are idle */
    best = avx512[dtype];
  }
#else
  (void)rounded;
  (void)width;
#endif
  return best;
}
