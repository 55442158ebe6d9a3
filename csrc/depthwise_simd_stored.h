/* depthwise_simd_stored: what depends on the stored type too, beside depthwise_simd_loops.h. Included by
 * depthwise_simd_set.h, which defines, and finds undefined afterwards, besides what that file needs:
 *
 *   HC_STORED       the type in memory
 *   HC_KIND(x)      x with a suffix for this stored type and instruction set
 *   HC_LOAD(value), HC_STORE(value)   from stored to packed and back
 */

HC_TARGET static void HC_KIND(pack_line)(const void *from_, int64_t step, int64_t count, void *packed_) {
  const HC_STORED *restrict from = from_;
  HC_PACKED *restrict packed = packed_;
  if (step == 1) {
    for (int64_t x = 0; x < count; ++x) {
      packed[x] = HC_LOAD(from[x]);
    }
  } else {
    for (int64_t x = 0; x < count; ++x) {
      packed[x] = HC_LOAD(from[x * step]);
    }
  }
}

HC_TARGET static void HC_KIND(pack_lines)(const void *from_, int64_t from_row, int64_t nrows, int64_t before,
                                          int64_t count, int64_t line, void *packed_, int64_t row) {
  typedef HC_NAME(vector) vector;
  const vector zeros = {0};
  for (int64_t r = 0; r < nrows; ++r) {
    const HC_STORED *from = (const HC_STORED *)from_ + r * from_row;
    HC_PACKED *packed = (HC_PACKED *)packed_ + r * row;
    /* Whole vectors, the last one of which goes over what is there: short lines, and calls of memset and memcpy would
     * take most of the time. */
    for (int64_t x = 0; x < line - HC_LANES; x += HC_LANES) {
      *(vector *)(packed + x) = zeros;
    }
    *(vector *)(packed + line - HC_LANES) = zeros;
    packed += before;
    /* NOLINTNEXTLINE(misc-redundant-expression): the two may be one type here, and two where this is included again */
    if (sizeof(HC_STORED) == sizeof(HC_PACKED) && count >= HC_LANES) {
      for (int64_t x = 0; x < count - HC_LANES; x += HC_LANES) {
        *(vector *)(packed + x) = *(const vector *)(const void *)(from + x);
      }
      *(vector *)(packed + count - HC_LANES) = *(const vector *)(const void *)(from + count - HC_LANES);
    } else {
      for (int64_t x = 0; x < count; ++x) {
        packed[x] = HC_LOAD(from[x]);
      }
    }
  }
}

HC_TARGET static void HC_KIND(pack_pixels)(const void *from_, int64_t step, int64_t channel_step,
                                           int64_t channels, int64_t count, void *packed_) {
  const HC_STORED *restrict from = from_;
  HC_PACKED *restrict packed = packed_;
  if (channel_step == 1 && channels == HC_LANES) {
    for (int64_t x = 0; x < count; ++x) {
      for (int64_t c = 0; c < HC_LANES; ++c) {
        packed[x * HC_LANES + c] = HC_LOAD(from[x * step + c]);
      }
    }
  } else if (channel_step == 0 && channels == HC_LANES) {
    for (int64_t x = 0; x < count; ++x) {
      const HC_PACKED value = HC_LOAD(from[x * step]);
      for (int64_t c = 0; c < HC_LANES; ++c) {
        packed[x * HC_LANES + c] = value;
      }
    }
  } else {
    for (int64_t x = 0; x < count; ++x) {
      for (int64_t c = 0; c < channels; ++c) {
        packed[x * HC_LANES + c] = HC_LOAD(from[x * step + c * channel_step]);
      }
      for (int64_t c = channels; c < HC_LANES; ++c) {
        packed[x * HC_LANES + c] = 0;
      }
    }
  }
}

HC_TARGET static void HC_KIND(unpack_line)(const void *packed_, int64_t count, void *to_, int64_t step) {
  const HC_PACKED *restrict packed = packed_;
  HC_STORED *restrict to = to_;
  if (step == 1) {
    for (int64_t x = 0; x < count; ++x) {
      to[x] = HC_STORE(packed[x]);
    }
  } else {
    for (int64_t x = 0; x < count; ++x) {
      to[x * step] = HC_STORE(packed[x]);
    }
  }
}

HC_TARGET static void HC_KIND(unpack_pixels)(const void *packed_, int64_t count, void *to_, int64_t step,
                                             int64_t channel_step, int64_t channels) {
  const HC_PACKED *restrict packed = packed_;
  HC_STORED *restrict to = to_;
  if (channel_step == 1 && channels == HC_LANES) {
    for (int64_t x = 0; x < count; ++x) {
      for (int64_t c = 0; c < HC_LANES; ++c) {
        to[x * step + c] = HC_STORE(packed[x * HC_LANES + c]);
      }
    }
  } else {
    for (int64_t x = 0; x < count; ++x) {
      for (int64_t c = 0; c < channels; ++c) {
        to[x * step + c * channel_step] = HC_STORE(packed[x * HC_LANES + c]);
      }
    }
  }
}

HC_TARGET static void HC_KIND(store)(double value, bool add, void *stored_) {
  HC_STORED *stored = stored_;
  if (add) {
    value += (double)HC_LOAD(*stored);
  }
  *stored = HC_STORE((HC_PACKED)value);
}

static const hc_simd HC_KIND(simd) = {
    .lanes = HC_LANES,
    .packed_size = sizeof(HC_PACKED),
    .stored_size = sizeof(HC_STORED),
    .correlate = HC_NAME(correlate),
    .reduce = HC_NAME(reduce),
    .correlate_rows = HC_NAME(correlate_rows),
    .reduce_rows = HC_NAME(reduce_rows),
    .flush = HC_NAME(flush),
    .flush_lanes = HC_NAME(flush_lanes),
    .pack_line = HC_KIND(pack_line),
    .pack_lines = HC_KIND(pack_lines),
    .pack_pixels = HC_KIND(pack_pixels),
    .unpack_line = HC_KIND(unpack_line),
    .unpack_pixels = HC_KIND(unpack_pixels),
    .store = HC_KIND(store),
};

#undef HC_STORED
#undef HC_KIND
#undef HC_LOAD
#undef HC_STORE
