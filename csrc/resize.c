/* resize: see resize.h. */
#include "resize.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* A product of two of these is an exact int64_t, and so is a scaled index. */
static const int64_t LARGEST = INT64_C(1) << 30;

static const char *const NAMES[] = {"nearest",   "nearest-exact", "linear",  "cubic",
                                    "linear-aa", "cubic-aa",      "adaptive"};

/* What all outputs share. */
typedef struct resize_rule {
  double ratio;
  double support,
      inverse; /* antialiased: half the filter's width in inputs, and what makes it 1 or 2 again */
  int64_t taps;
} resize_rule;

/* Where one output reads: `count` inputs from `first` on, which may lie beyond the border. */
typedef struct resize_place {
  int64_t first, count;
  double at; /* linear, cubic: fraction past the floor; antialiased: the centre */
} resize_place;

hc_code hc_resize_mode_parse(const char *name, hc_resize_mode *mode, hc_status *status) {
  for (int i = HC_RESIZE_NEAREST; i <= HC_RESIZE_ADAPTIVE; ++i) {
    if (strcmp(name, NAMES[i]) == 0) {
      *mode = (hc_resize_mode)i;
      return HC_OK;
    }
  }
  return hc_fail(status, HC_ERROR_ARGUMENT,
                 "mode is '%.40s', expected 'nearest', 'nearest-exact', 'linear', 'cubic', 'linear-aa', "
                 "'cubic-aa' or 'adaptive'",
                 name);
}

static hc_code check_size(const char *name, int64_t value, hc_status *status) {
  if (value < 1 || value > LARGEST) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "%s is %" PRId64 ", expected 1 to %" PRId64, name, value,
                   LARGEST);
  }
  return HC_OK;
}

static bool is_nearest(const hc_resize *r) {
  return r->mode == HC_RESIZE_NEAREST || r->mode == HC_RESIZE_NEAREST_EXACT;
}

static bool is_antialiased(const hc_resize *r) {
  return r->mode == HC_RESIZE_LINEAR_AA || r->mode == HC_RESIZE_CUBIC_AA;
}

hc_code hc_resize_check(const hc_resize *r, hc_status *status) {
  HC_TRY(check_size("in_size", r->in, status));
  HC_TRY(check_size("out_size", r->out, status));
  if (r->align_corners && (is_nearest(r) || r->mode == HC_RESIZE_ADAPTIVE)) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "align_corners is true, expected false in mode '%s'",
                   NAMES[r->mode]);
  }
  if (r->mode == HC_RESIZE_ADAPTIVE && !(r->scale <= 0)) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "scale is %g, expected none in mode 'adaptive'", r->scale);
  }
  /* Not a number is refused too. */
  if (!(r->scale <= 0) && !(r->scale >= 1.0 / (double)LARGEST && r->scale <= (double)LARGEST)) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "scale is %g, expected 2^-30 to 2^30, or 0 or less for none",
                   r->scale);
  }
done:
  return status->code;
}

/* A step of ATen's arithmetic, in its type. One operation in double, rounded, is that operation in float. */
static double in_type(bool single_precision, double value) {
  return single_precision ? (double)(float)value : value;
}

static double step(const hc_resize *r, double value) { return in_type(r->single_precision, value); }

/* a * b + c, in one step where ATen's compiler made one of it. */
static double multiply_add(const hc_resize *r, double a, double b, double c) {
  if (!r->fused) {
    return step(r, step(r, a * b) + c);
  }
  return r->single_precision ? (double)fmaf((float)a, (float)b, (float)c) : fma(a, b, c);
}

static double absolute(double value) { return value < 0 ? -value : value; }

/* ATen calls floorf, also with a double. */
static int64_t floor_of(double value) {
  const double rounded = in_type(true, value);
  const int64_t whole = (int64_t)rounded;
  return (double)whole > rounded ? whole - 1 : whole;
}

static int64_t ceil_of(double value) {
  const int64_t whole = (int64_t)value;
  return (double)whole < value ? whole + 1 : whole;
}

/* Where ATen copies, output o is input o >> shift, the shift being 0 or 1; elsewhere the shift is -1. */
static int copy_shift(const hc_resize *r) {
  const bool special = r->mode == HC_RESIZE_NEAREST && r->channels_last;
  if (r->out == r->in && (special || r->mode == HC_RESIZE_LINEAR || is_antialiased(r))) {
    return 0;
  }
  return special && r->out == 2 * r->in ? 1 : -1;
}

static double ratio_of(const hc_resize *r) {
  const bool single = r->single_precision || (is_nearest(r) && r->channels_last);
  if (r->align_corners) {
    const double in = in_type(single, (double)(r->in - 1)), out = in_type(single, (double)(r->out - 1));
    return r->out > 1 ? in_type(single, in / out) : 0;
  }
  if (r->scale > 0) {
    return in_type(single, 1.0 / r->scale);
  }
  return in_type(single, in_type(single, (double)r->in) / in_type(single, (double)r->out));
}

static int64_t common_divisor(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

static resize_rule rule_of(const hc_resize *r) {
  resize_rule rule = {ratio_of(r), 0, 0, 1};
  if (copy_shift(r) >= 0) {
    return rule;
  }
  switch (r->mode) {
  case HC_RESIZE_NEAREST:
  case HC_RESIZE_NEAREST_EXACT:
    break;
  case HC_RESIZE_LINEAR:
    rule.taps = 2;
    break;
  case HC_RESIZE_CUBIC:
    rule.taps = 4;
    break;
  case HC_RESIZE_LINEAR_AA:
  case HC_RESIZE_CUBIC_AA: {
    const double half = r->mode == HC_RESIZE_LINEAR_AA ? 1 : 2;
    rule.support = rule.ratio >= 1 ? step(r, half * rule.ratio) : half;
    rule.inverse = rule.ratio >= 1 ? step(r, 1 / rule.ratio) : 1;
    rule.taps = hc_min(ceil_of(rule.support) * 2 + 1, r->in);
    break;
  }
  case HC_RESIZE_ADAPTIVE: /* the bin that begins furthest behind a whole index */
    rule.taps = hc_ceil_div(r->in + r->out - common_divisor(r->in, r->out), r->out);
    break;
  }
  return rule;
}

/* The position that linear and cubic interpolate at. */
static double source_of(const hc_resize *r, const resize_rule *rule, int64_t o) {
  const double index = step(r, (double)o);
  if (r->align_corners) {
    return step(r, rule->ratio * index);
  }
  const double source = multiply_add(r, rule->ratio, step(r, index + 0.5), -0.5);
  return source < 0 && r->mode != HC_RESIZE_CUBIC ? 0 : source;
}

static int64_t nearest_of(const hc_resize *r, const resize_rule *rule, int64_t o) {
  const double index = (double)o;
  if (r->mode == HC_RESIZE_NEAREST) {
    const bool single = r->single_precision || r->channels_last;
    return floor_of(in_type(single, rule->ratio * in_type(single, index)));
  }
  return floor_of(r->channels_last ? (index + 0.5) * rule->ratio : source_of(r, rule, o) + 0.5);
}

static resize_place place_of(const hc_resize *r, const resize_rule *rule, int64_t o) {
  resize_place place = {0, 1, 0};
  if (copy_shift(r) >= 0) {
    place.first = o >> copy_shift(r);
    return place;
  }
  switch (r->mode) {
  case HC_RESIZE_NEAREST:
  case HC_RESIZE_NEAREST_EXACT:
    place.first = nearest_of(r, rule, o);
    break;
  case HC_RESIZE_LINEAR:
  case HC_RESIZE_CUBIC: {
    const double source = source_of(r, rule, o);
    const int64_t index = hc_min(floor_of(source), r->in - 1);
    const double fraction = step(r, source - step(r, (double)index));
    place.at = fraction < 0 ? 0 : fraction > 1 ? 1 : fraction;
    place.first = r->mode == HC_RESIZE_CUBIC ? index - 1 : index;
    place.count = rule->taps;
    break;
  }
  case HC_RESIZE_LINEAR_AA:
  case HC_RESIZE_CUBIC_AA: {
    place.at = step(r, rule->ratio * ((double)o + 0.5));
    place.first = hc_max((int64_t)(step(r, place.at - rule->support) + 0.5), 0);
    place.count = hc_min((int64_t)(step(r, place.at + rule->support) + 0.5), r->in) - place.first;
    place.count = hc_max(0, hc_min(place.count, rule->taps));
    break;
  }
  case HC_RESIZE_ADAPTIVE:
    place.first = o * r->in / r->out;
    place.count = hc_ceil_div((o + 1) * r->in, r->out) - place.first;
    break;
  }
  return place;
}

/* The compiler fused the last step of the antialiased filter, and not that of the plain cubic. */
static double last_step(const hc_resize *r, double a, double b, double c) {
  return is_antialiased(r) ? multiply_add(r, a, b, c) : step(r, step(r, a * b) + c);
}

/* ((A + 2) x - (A + 3)) x^2 + 1, for 0 <= x <= 1. */
static double cubic_near(const hc_resize *r, double x, double a) {
  const double inner = multiply_add(r, a + 2, x, -(a + 3));
  return last_step(r, step(r, inner * x), x, 1);
}

/* ((A x - 5 A) x + 8 A) x - 4 A, for 1 <= x <= 2. */
static double cubic_far(const hc_resize *r, double x, double a) {
  const double inner = multiply_add(r, a, x, -5 * a);
  return last_step(r, multiply_add(r, inner, x, 8 * a), x, -4 * a);
}

static double cubic_weight(const hc_resize *r, double fraction, int64_t tap) {
  const double a = -0.75, rest = step(r, 1 - fraction);
  switch (tap) {
  case 0:
    return cubic_far(r, step(r, fraction + 1), a);
  case 1:
    return cubic_near(r, fraction, a);
  case 2:
    return cubic_near(r, rest, a);
  default:
    return cubic_far(r, step(r, rest + 1), a);
  }
}

static double filter_weight(const hc_resize *r, const resize_rule *rule, const resize_place *place,
                            int64_t tap) {
  const double index = step(r, (double)(place->first + tap));
  const double x = absolute(step(r, (step(r, index - place->at) + 0.5) * rule->inverse));
  if (r->mode == HC_RESIZE_LINEAR_AA) {
    return x < 1 ? step(r, 1 - x) : 0;
  }
  return x < 1 ? cubic_near(r, x, -0.5) : x < 2 ? cubic_far(r, x, -0.5) : 0;
}

/* Before an antialiased row is divided by its sum. */
static double weight_of(const hc_resize *r, const resize_rule *rule, const resize_place *place, int64_t tap) {
  if (copy_shift(r) >= 0) {
    return 1;
  }
  switch (r->mode) {
  case HC_RESIZE_LINEAR:
    return tap == 0 ? step(r, 1 - place->at) : place->at;
  case HC_RESIZE_CUBIC:
    return cubic_weight(r, place->at, tap);
  case HC_RESIZE_LINEAR_AA:
  case HC_RESIZE_CUBIC_AA:
    return filter_weight(r, rule, place, tap);
  case HC_RESIZE_ADAPTIVE:
    return step(r, 1.0 / (double)place->count);
  case HC_RESIZE_NEAREST:
  case HC_RESIZE_NEAREST_EXACT:
    break;
  }
  return 1;
}

/* The inputs of a row that have a weight; when none has, the one that its indices name all the same. */
static hc_interval span_of(const hc_resize *r, const resize_rule *rule, const resize_place *place) {
  int64_t begin = 0, end = place->count;
  while (begin < end && weight_of(r, rule, place, begin) == 0) {
    ++begin;
  }
  while (begin < end && weight_of(r, rule, place, end - 1) == 0) {
    --end;
  }
  const int64_t first = hc_max(0, hc_min(place->first + begin, r->in - 1));
  const int64_t last = hc_max(first, hc_min(place->first + end - 1, r->in - 1));
  const hc_interval span = {first, last + 1};
  return span;
}

int64_t hc_resize_tap_count(const hc_resize *r) { return rule_of(r).taps; }

void hc_resize_taps(const hc_resize *r, hc_interval out, int64_t taps, int64_t *index, double *weight) {
  const resize_rule rule = rule_of(r);
  for (int64_t o = out.begin; o < out.end; ++o, index += taps, weight += taps) {
    const resize_place place = place_of(r, &rule, o);
    const hc_interval span = span_of(r, &rule, &place);
    double total = 0;
    for (int64_t tap = 0; tap < taps; ++tap) {
      index[tap] = hc_max(span.begin, hc_min(place.first + tap, span.end - 1));
      weight[tap] = tap < place.count ? weight_of(r, &rule, &place, tap) : 0;
      total = step(r, total + weight[tap]);
    }
    for (int64_t tap = 0; tap < taps && is_antialiased(r) && total != 0; ++tap) {
      weight[tap] = step(r, weight[tap] / total);
    }
  }
}

hc_interval hc_resize_reads(const hc_resize *r, hc_interval out) {
  const resize_rule rule = rule_of(r);
  hc_interval reads = {0, 0};
  for (int64_t o = out.begin; o < out.end; ++o) {
    const resize_place place = place_of(r, &rule, o);
    const hc_interval span = span_of(r, &rule, &place);
    reads.begin = o == out.begin ? span.begin : hc_min(reads.begin, span.begin);
    reads.end = o == out.begin ? span.end : hc_max(reads.end, span.end);
  }
  return reads;
}
