/* bfloat16: the upper half of a float32, as bits. C11 has no type for it. */
#ifndef HC_BFLOAT16_H
#define HC_BFLOAT16_H

#include <stdint.h>
#include <string.h>

static inline __attribute__((always_inline)) float hc_from_bfloat16(uint16_t stored) {
  const uint32_t bits = (uint32_t)stored << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Rounded to nearest, ties to even; a NaN stays one. */
static inline __attribute__((always_inline)) uint16_t hc_to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return (uint16_t)((bits & 0x7FFFFFFFU) > 0x7F800000U ? 0x7FC0U : rounded);
}

#endif
