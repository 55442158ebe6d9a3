/* depthwise_simd_set: all loops of one instruction set, for each summed-in and each stored type. Included by
 * depthwise_simd.c, which defines, and finds undefined afterwards:
 *
 *   HC_SET(x)    x with a suffix of this set's own
 *   HC_TARGET    the function attribute that names the instruction set
 *   HC_BYTES     of a vector
 *   HC_COLUMNS   how many vectors of sums are held in registers, 8 or 16
 *   HC_ROWS      rows of outputs held in registers, 2 or 4, four vectors of each
 *   HC_TAPS      adjacent taps of a row whose sums are held in registers, for three rows of taps
 *   HC_FMA_FLOAT(a, b, c), HC_FMA_DOUBLE(a, b, c)  a * b + c of vectors
 */

#define HC_PACKED  float
#define HC_LANES   (HC_BYTES / 4)
#define HC_FMA     HC_FMA_FLOAT
#define HC_NAME(x) HC_SET(x##_float)
#include "depthwise_simd_loops.h"
#include "depthwise_simd_rows.h"

#define HC_STORED  float
#define HC_KIND(x) HC_SET(x##_float32)
#define HC_LOAD    HC_AS_IT_IS
#define HC_STORE   HC_AS_IT_IS
#include "depthwise_simd_stored.h"

#define HC_STORED  uint16_t
#define HC_KIND(x) HC_SET(x##_bfloat16)
#define HC_LOAD    hc_from_bfloat16
#define HC_STORE   hc_to_bfloat16
#include "depthwise_simd_stored.h"

#undef HC_PACKED
#undef HC_LANES
#undef HC_FMA
#undef HC_NAME

#define HC_PACKED  double
#define HC_LANES   (HC_BYTES / 8)
#define HC_FMA     HC_FMA_DOUBLE
#define HC_NAME(x) HC_SET(x##_double)
#include "depthwise_simd_loops.h"
#include "depthwise_simd_rows.h"

#define HC_STORED  double
#define HC_KIND(x) HC_SET(x##_float64)
#define HC_LOAD    HC_AS_IT_IS
#define HC_STORE   HC_AS_IT_IS
#include "depthwise_simd_stored.h"

#undef HC_PACKED
#undef HC_LANES
#undef HC_FMA
#undef HC_NAME

#undef HC_SET
#undef HC_TARGET
#undef HC_BYTES
#undef HC_COLUMNS
#undef HC_ROWS
#undef HC_TAPS
#undef HC_FMA_FLOAT
#undef HC_FMA_DOUBLE
