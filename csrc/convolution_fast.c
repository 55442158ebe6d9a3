/* convolution_fast: see convolution_fast.h. */
#include "convolution_fast.h"

#include <stdatomic.h>
#include <string.h>

/* ---- for tests ---- */

enum { AUTO, GENERAL, FAST, PATHS };
static const char *const NAMES[PATHS] = {"auto", "general", "fast"};
static atomic_int path = AUTO;
static _Atomic int64_t counts[HC_COUNTS]; /* kernels run on several threads */

bool hc_fast_set_path(const char *name) {
  for (int i = 0; i < PATHS; ++i) {
    if (strcmp(name, NAMES[i]) == 0) {
      path = i;
      return true;
    }
  }
  return false;
}

const char *hc_fast_path(void) { return NAMES[path]; }

int64_t hc_fast_counted(hc_fast_count which) { return counts[which]; }

static bool chosen(bool fast, hc_fast_count if_fast, hc_fast_count if_general) {
  ++counts[fast ? if_fast : if_general];
  return fast;
}

/* ---- whether and how ---- */

/* Where the copy is cheaper: strips are more than this part of the own outputs, or the weight, which a second call takes
 * in again, and whose gradient it makes again, is more than so many times the shard. With a stride the extended buffer
 * costs more: ATen's gradient of a weight over one of odd width takes a scratch buffer many times its size. */
enum { STRIPS_AT_MOST_ONE_IN = 3, WEIGHT_AT_MOST_SHARDS = 2, WEIGHT_AT_MOST_SHARDS_STRIDED = 8 };

/* Whether the general path takes this rank's tensor as it is, and no rank sends anything. */
static bool is_whole(const hc_layout_dim *dim, bool of_input) {
  const hc_axis *axis = of_input ? &dim->in : &dim->out;
  const hc_interval own = of_input ? dim->in_own : dim->out_own;
  const hc_fit *fit = &dim->fit;
  return !dim->planned || (fit->extent.begin == own.begin && fit->extent.end == own.end && fit->lead == 0 &&
                           fit->crop_lo == 0 && fit->crop_hi == 0 &&
                           hc_extents_are_local(axis->size, axis->world, dim->extents, axis->periodic));
}

/* The last dimension that isn't whole, -1 where there is none. */
static int64_t last_dim(const hc_layout *layout, bool of_input) {
  int64_t d = layout->nspatial - 1;
  while (d >= 0 && is_whole(&layout->dims[d], of_input)) {
    --d;
  }
  return d;
}

/* Whether the local tensors will have elements once all dimensions but d are assembled. */
static bool has_elements(const hc_layout *layout, int64_t d) {
  bool some = layout->input.sizes[0] > 0 && layout->input.sizes[1] > 0 && layout->out.sizes[1] > 0;
  for (int64_t i = 0; i < layout->nspatial; ++i) {
    const hc_layout_dim *dim = &layout->dims[i];
    some = some && hc_length(dim->in_own) > 0;
    some = some && (i == d || !dim->planned ? hc_length(dim->out_own) > 0 : hc_length(dim->fit.extent) > 0);
  }
  return some;
}

/* Whether the local convolution, zero-padded, gives exactly the own outputs. */
static bool is_exact(const hc_layout_dim *dim, int64_t *padding) {
  const hc_interval reads = hc_window_reads(&dim->window, dim->out_own);
  const int64_t left = dim->in_own.begin - reads.begin, right = reads.end - dim->in_own.end;
  const int64_t reach = dim->window.dilation * (dim->window.kernel - 1);
  *padding = left;
  return left >= 0 && left <= reach && left >= right && left - right < dim->window.stride;
}

/* Completes `fast` for strips of lower and upper outputs; one length for both makes one call of them. */
static bool use_strips(const hc_layout *layout, int64_t lower, int64_t upper, bool inside, hc_fast *fast) {
  const hc_layout_dim *dim = &layout->dims[fast->d];
  const int64_t length = hc_max(lower, upper), own = hc_length(dim->out_own);
  fast->nstrips = 0;
  if (lower > 0) {
    const int64_t begin = dim->out_own.begin - (inside ? 0 : length);
    fast->outputs[fast->nstrips++] = (hc_interval){begin, begin + length};
  }
  if (upper > 0) {
    const int64_t begin = dim->out_own.end - (inside ? length : 0);
    fast->outputs[fast->nstrips++] = (hc_interval){begin, begin + length};
  }
  const int64_t most_shards = dim->window.stride > 1 ? WEIGHT_AT_MOST_SHARDS_STRIDED : WEIGHT_AT_MOST_SHARDS;
  return path == FAST || fast->nstrips == 0 ||
         (fast->nstrips * length * STRIPS_AT_MOST_ONE_IN <= own &&
          hc_shape_numel(&layout->weight) <= most_shards * hc_shape_numel(&layout->input));
}

static bool choose_forward(const hc_layout *layout, hc_fast *fast) {
  fast->d = last_dim(layout, true);
  if (path == GENERAL || layout->dims[0].window.transposed || fast->d < 0 || !has_elements(layout, fast->d)) {
    return false;
  }
  const hc_layout_dim *dim = &layout->dims[fast->d];
  if (!is_exact(dim, &fast->padding)) {
    return false;
  }
  const hc_window *window = &dim->window;
  const int64_t reach = window->dilation * (window->kernel - 1);
  int64_t lower = 0, upper = 0;
  /* How many outputs read what others hold, or, periodic, another image of the own shard. */
  if (window->periodic || dim->in_own.begin > 0) {
    lower = hc_min(hc_ceil_div(fast->padding, window->stride), hc_length(dim->out_own));
  }
  if (window->periodic || dim->in_own.end < dim->in.size) {
    const int64_t first = hc_ceil_div(dim->in_own.end + window->pad_lo - reach, window->stride);
    upper = dim->out_own.end - hc_min(dim->out_own.end, hc_max(dim->out_own.begin, first));
  }
  return use_strips(layout, lower, upper, true, fast);
}

static bool choose_backward(const hc_layout *layout, hc_fast *fast) {
  fast->d = last_dim(layout, false);
  if (path == GENERAL || layout->dims[0].window.transposed || fast->d < 0 || !has_elements(layout, fast->d)) {
    return false;
  }
  const hc_layout_dim *dim = &layout->dims[fast->d];
  if (!is_exact(dim, &fast->padding)) {
    return false;
  }
  const hc_interval all = {0, dim->out.size};
  const hc_interval touching = hc_intersect(dim->fit.extent, all); /* outputs of all ranks */
  return use_strips(layout, dim->out_own.begin - touching.begin, touching.end - dim->out_own.end, false,
                    fast);
}

bool hc_fast_choose_forward(const hc_layout *layout, hc_fast *fast) {
  return chosen(choose_forward(layout, fast), HC_COUNT_FORWARD_FAST, HC_COUNT_FORWARD_GENERAL);
}

bool hc_fast_choose_backward(const hc_layout *layout, hc_fast *fast) {
  return chosen(choose_backward(layout, fast), HC_COUNT_BACKWARD_FAST, HC_COUNT_BACKWARD_GENERAL);
}

/* ---- turned strips ----
 *
 * Strips are few columns wide, and ATen's dense channels_last kernels on the CPU want many along the last dimension: they
 * take half the time for strips whose last two dimensions are swapped. Strips are laid out in memory for that, and what
 * ATen gets, and gives, are views. In the other memory format there is nothing to gain.
 */

static bool are_turned(const hc_layout *layout, const hc_fast *fast, const hc_shape *strips) {
  return fast->d > 0 && fast->d == layout->nspatial - 1 && layout->weight.sizes[1] > 1 &&
         hc_shape_on_cpu(strips) && hc_shape_is_channels_last(strips);
}

static void swap(int64_t *values, int64_t last) {
  const int64_t value = values[last];
  values[last] = values[last - 1];
  values[last - 1] = value;
}

static void turn_shape(hc_shape *shape) {
  swap(shape->sizes, shape->ndim - 1);
  swap(shape->strides, shape->ndim - 1);
}

static void turn_params(hc_conv_params *params) {
  swap(params->stride, params->nspatial - 1);
  swap(params->padding, params->nspatial - 1);
  swap(params->dilation, params->nspatial - 1);
}

/* Replaces *tensor, which may be NULL, by a view. */
static hc_code turn(AtenTensorHandle *tensor, hc_status *status) {
  AtenTensorHandle view = NULL;
  hc_shape shape;
  if (*tensor == NULL) {
    return HC_OK;
  }
  HC_TRY(hc_tensor_shape(*tensor, &shape, status));
  turn_shape(&shape);
  HC_TRY_TORCH(status,
               aoti_torch__reinterpret_tensor(*tensor, shape.ndim, shape.sizes, shape.strides, 0, &view));
  hc_tensor_free(tensor);
  *tensor = view;
done:
  return status->code;
}

/* The weight as the strips want it. */
static hc_code weight_for(AtenTensorHandle weight, bool turned, AtenTensorHandle *out, hc_status *status) {
  HC_TRY(hc_tensor_share(weight, out, status));
  if (turned) {
    HC_TRY(turn(out, status));
  }
done:
  return status->code;
}

/* ---- strips ---- */

/* Strips stacked along the batch, `length` columns each, zero; in the memory format of `like`, which, if `turned`, is
 * that of the turned strips. `shape` is that of one. */
static hc_code new_strips(const hc_shape *like, int64_t nstrips, int64_t dim, int64_t length, bool turned,
                          hc_shape *shape, AtenTensorHandle *out, hc_status *status) {
  *shape = *like;
  shape->sizes[0] *= nstrips;
  shape->sizes[dim] = length;
  if (turned) {
    turn_shape(shape);
  }
  hc_shape_set_strides(shape, hc_shape_is_channels_last(like));
  if (turned) {
    turn_shape(shape);
  }
  HC_TRY(hc_tensor_zeros(shape, out, status));
  shape->sizes[0] = like->sizes[0];
done:
  return status->code;
}

/* Strip i; `shape` is that of one. */
static hc_part strip_of(AtenTensorHandle strips, const hc_shape *shape, int64_t i) {
  hc_part strip = hc_part_of(strips, shape);
  strip.offset_bytes =
      i * shape->sizes[0] * shape->strides[0] * (int64_t)aoti_torch_dtype_element_size(shape->dtype);
  return strip;
}

/* The strips of what an exchange assembles, over `columns`. `local` is what was exchanged. */
static hc_code exchanged_strips(const hc_exchange *exchange, AtenTensorHandle local, int64_t nstrips,
                                const hc_interval *columns, bool turned, AtenTensorHandle *out,
                                hc_status *status) {
  AtenTensorHandle strips = NULL;
  hc_shape shape;
  hc_moves moves;
  hc_moves_init(false, &moves);
  HC_TRY(new_strips(&exchange->shape, nstrips, exchange->axis.dim, hc_length(columns[0]), turned, &shape,
                    &strips, status));
  for (int64_t i = 0; i < nstrips; ++i) {
    const hc_part strip = strip_of(strips, &shape, i);
    HC_TRY(hc_exchange_copy(exchange, local, columns[i], &strip, &moves, status));
  }
  HC_TRY(hc_moves_run(&moves, status));
  *out = strips;
  strips = NULL;
done:
  hc_tensor_free(&strips);
  return status->code;
}

/* What the strips, over `columns`, share with `local`, over `own`: copied from there, or brought home, overwriting or
 * adding. */
typedef enum direction { FROM_LOCAL, TO_LOCAL, ADDED_TO_LOCAL } direction;

static hc_code move_strips(direction which, AtenTensorHandle strips, const hc_shape *shape, int64_t nstrips,
                           const hc_interval *columns, int64_t dim, AtenTensorHandle local, hc_interval own,
                           hc_status *status) {
  hc_shape local_shape;
  hc_moves moves;
  hc_moves_init(which == ADDED_TO_LOCAL, &moves);
  HC_TRY(hc_tensor_shape(local, &local_shape, status));
  const hc_part shard = hc_part_of(local, &local_shape);
  for (int64_t i = 0; i < nstrips; ++i) {
    const hc_interval both = hc_intersect(own, columns[i]);
    const int64_t length = hc_length(both);
    if (length > 0) {
      const hc_part strip = strip_of(strips, shape, i);
      const hc_part ours = hc_part_narrow(&strip, dim, both.begin - columns[i].begin, length);
      const hc_part theirs = hc_part_narrow(&shard, dim, both.begin - own.begin, length);
      HC_TRY(hc_moves_push(&moves, which == FROM_LOCAL ? &ours : &theirs,
                           which == FROM_LOCAL ? &theirs : &ours, status));
      if (which == ADDED_TO_LOCAL) { /* strips may overlap */
        HC_TRY(hc_moves_run(&moves, status));
      }
    }
  }
  HC_TRY(hc_moves_run(&moves, status));
done:
  return status->code;
}

/* The strips of a shard over `columns`, zero where it does not own them. */
static hc_code own_strips(AtenTensorHandle local, hc_interval own, int64_t dim, int64_t nstrips,
                          const hc_interval *columns, bool turned, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle strips = NULL;
  hc_shape local_shape, shape;
  HC_TRY(hc_tensor_shape(local, &local_shape, status));
  HC_TRY(new_strips(&local_shape, nstrips, dim, hc_length(columns[0]), turned, &shape, &strips, status));
  HC_TRY(move_strips(FROM_LOCAL, strips, &shape, nstrips, columns, dim, local, own, status));
  *out = strips;
  strips = NULL;
done:
  hc_tensor_free(&strips);
  return status->code;
}

/* Brings the strips, over `columns`, home into `target`, which covers `own`: overwrites, or adds. */
static hc_code bring_home(AtenTensorHandle strips, int64_t nstrips, const hc_interval *columns, int64_t dim,
                          hc_interval own, bool add, AtenTensorHandle target, hc_status *status) {
  hc_shape shape;
  HC_TRY(hc_tensor_shape(strips, &shape, status));
  shape.sizes[0] /= nstrips;
  HC_TRY(move_strips(add ? ADDED_TO_LOCAL : TO_LOCAL, strips, &shape, nstrips, columns, dim, target, own,
                     status));
done:
  return status->code;
}

/* The columns that the strips' windows read. */
static void strips_read(const hc_fast *fast, const hc_window *window, hc_interval *columns) {
  for (int64_t i = 0; i < fast->nstrips; ++i) {
    columns[i] = hc_window_reads(window, fast->outputs[i]);
  }
}

/* ---- forward ---- */

hc_code hc_fast_forward(const hc_layout *layout, const hc_fast *fast, const hc_conv_params *params,
                        AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle bias,
                        AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle result = NULL, strips = NULL, mended = NULL, used = NULL;
  const hc_layout_dim *dim = &layout->dims[fast->d];
  const int64_t tensor_dim = 2 + fast->d;
  hc_conv_params padded = *params, bare = *params;
  hc_interval columns[2];
  hc_exchange exchange;
  memset(&exchange, 0, sizeof exchange);
  padded.padding[fast->d] = fast->padding;
  bare.padding[fast->d] = 0;
  strips_read(fast, &dim->window, columns);
  HC_TRY(hc_exchange_begin(input, &dim->in, dim->extents, "convolution", &exchange, status));
  HC_TRY(hc_tensor_convolution(input, weight, bias, &padded, &result, status));
  HC_TRY(hc_exchange_wait(&exchange, status));
  if (fast->nstrips > 0) {
    const bool turned = are_turned(layout, fast, &exchange.shape);
    HC_TRY(exchanged_strips(&exchange, input, fast->nstrips, columns, turned, &strips, status));
    hc_exchange_drop(&exchange); /* its buffers, before those of the convolution */
    HC_TRY(weight_for(weight, turned, &used, status));
    if (turned) {
      turn_params(&bare);
      HC_TRY(turn(&strips, status));
    }
    HC_TRY(hc_tensor_convolution(strips, used, bias, &bare, &mended, status));
    if (turned) {
      HC_TRY(turn(&mended, status));
    }
    HC_TRY(bring_home(mended, fast->nstrips, fast->outputs, tensor_dim, dim->out_own, false, result, status));
    ++counts[HC_COUNT_FORWARD_STRIPS];
  }
  *out = result;
  result = NULL;
done:
  hc_exchange_drop(&exchange);
  hc_tensor_free(&result);
  hc_tensor_free(&strips);
  hc_tensor_free(&mended);
  hc_tensor_free(&used);
  return status->code;
}

/* ---- backward ---- */

/* sum += other. */
static hc_code add_to(AtenTensorHandle sum, AtenTensorHandle other, hc_status *status) {
  hc_shape sum_shape, shape;
  HC_TRY(hc_tensor_shape(sum, &sum_shape, status));
  HC_TRY(hc_tensor_shape(other, &shape, status));
  const hc_part target = hc_part_of(sum, &sum_shape), source = hc_part_of(other, &shape);
  HC_TRY(hc_move(true, &target, &source, status));
done:
  return status->code;
}

/* Adds the pairs of own input columns and other ranks' output columns to the gradients that are not NULL. Uses up
 * `bare`. */
static hc_code add_strips(const hc_layout *layout, const hc_fast *fast, hc_conv_params *bare,
                          hc_exchange *exchange, AtenTensorHandle grad_output, AtenTensorHandle input,
                          AtenTensorHandle weight, AtenTensorHandle *grad_input,
                          AtenTensorHandle *grad_weight, hc_status *status) {
  AtenTensorHandle grad_strips = NULL, input_strips = NULL, of_input = NULL, of_weight = NULL, used = NULL;
  const hc_layout_dim *dim = &layout->dims[fast->d];
  const int64_t tensor_dim = 2 + fast->d;
  const bool turned = are_turned(layout, fast, &exchange->shape);
  hc_interval columns[2];
  strips_read(fast, &dim->window, columns);
  HC_TRY(exchanged_strips(exchange, grad_output, fast->nstrips, fast->outputs, turned, &grad_strips, status));
  hc_exchange_drop(exchange); /* its buffers, before those of the convolution */
  HC_TRY(own_strips(input, dim->in_own, tensor_dim, fast->nstrips, columns, turned, &input_strips, status));
  HC_TRY(weight_for(weight, turned, &used, status));
  if (turned) {
    turn_params(bare);
    HC_TRY(turn(&grad_strips, status));
    HC_TRY(turn(&input_strips, status));
  }
  HC_TRY(hc_tensor_convolution_backward(grad_strips, input_strips, used, bare, *grad_input != NULL,
                                        *grad_weight != NULL, &of_input, &of_weight, status));
  if (turned) {
    HC_TRY(turn(&of_input, status));
    HC_TRY(turn(&of_weight, status));
  }
  if (*grad_input != NULL) {
    HC_TRY(bring_home(of_input, fast->nstrips, columns, tensor_dim, dim->in_own, true, *grad_input, status));
  }
  if (*grad_weight != NULL) {
    HC_TRY(add_to(*grad_weight, of_weight, status));
  }
  ++counts[HC_COUNT_BACKWARD_STRIPS];
done:
  hc_tensor_free(&grad_strips);
  hc_tensor_free(&input_strips);
  hc_tensor_free(&of_input);
  hc_tensor_free(&of_weight);
  hc_tensor_free(&used);
  return status->code;
}

hc_code hc_fast_backward(const hc_layout *layout, const hc_fast *fast, const hc_conv_params *params,
                         AtenTensorHandle grad_output, AtenTensorHandle input, AtenTensorHandle weight,
                         bool need_input, bool need_weight, AtenTensorHandle *grad_input,
                         AtenTensorHandle *grad_weight, hc_status *status) {
  AtenTensorHandle of_input = NULL, of_weight = NULL;
  const hc_layout_dim *dim = &layout->dims[fast->d];
  hc_conv_params padded = *params, bare = *params;
  hc_exchange exchange;
  memset(&exchange, 0, sizeof exchange);
  padded.padding[fast->d] = fast->padding;
  bare.padding[fast->d] = 0;
  HC_TRY(hc_exchange_begin(grad_output, &dim->out, dim->extents, "convolution_backward", &exchange, status));
  HC_TRY(hc_tensor_convolution_backward(grad_output, input, weight, &padded, need_input, need_weight,
                                        &of_input, &of_weight, status));
  HC_TRY(hc_exchange_wait(&exchange, status));
  if (fast->nstrips > 0) {
    HC_TRY(add_strips(layout, fast, &bare, &exchange, grad_output, input, weight, &of_input, &of_weight,
                      status));
  }
  *grad_input = of_input;
  *grad_weight = of_weight;
  of_input = of_weight = NULL;
done:
  hc_exchange_drop(&exchange);
  hc_tensor_free(&of_input);
  hc_tensor_free(&of_weight);
  return status->code;
}
