/* convolution: see convolution.h. */
#include "convolution.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* One spatial dimension, worked out. */
typedef struct dimension {
  bool planned;
  hc_window window;
  hc_axis in, out;             /* the input's and the output's place on the group */
  hc_interval in_own, out_own; /* this rank's shards of them */
  hc_interval *extents;        /* owned: one per rank, for the exchange at hand */
  hc_fit fit;                  /* of this rank, where the exchange at hand uses a fit */
} dimension;

typedef struct layout {
  int64_t nspatial;
  dimension dims[HC_MAX_SPATIAL];
  hc_shape input, weight, out; /* local */
} layout;

static void layout_free(layout *plan) {
  for (int64_t d = 0; d < HC_MAX_SPATIAL; ++d) {
    free(plan->dims[d].extents);
    plan->dims[d].extents = NULL;
  }
}

/* ---- checks and sizes ---- */

static hc_code check_tensors(const hc_convolution *conv, const layout *plan, AtenTensorHandle bias,
                             hc_status *status) {
  const hc_shape *input = &plan->input, *weight = &plan->weight;
  const int64_t groups = conv->params.groups, channels = input->ndim > 1 ? input->sizes[1] : 0;
  if (input->ndim != plan->nspatial + 2 || weight->ndim != input->ndim) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "input has %" PRId64 " and weight %" PRId64 " dimensions, expected %" PRId64 " each",
                   input->ndim, weight->ndim, plan->nspatial + 2);
  }
  if (weight->dtype != input->dtype || weight->device_type != input->device_type) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "weight has another dtype or device than input, expected the same");
  }
  if (groups < 1 || channels % groups != 0 || weight->sizes[0] % groups != 0) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "groups is %" PRId64 ", expected a divisor of the %" PRId64
                   " input channels and of weight's %" PRId64,
                   groups, channels, weight->sizes[0]);
  }
  const int64_t expected = conv->params.transposed ? weight->sizes[0] : weight->sizes[1] * groups;
  if (channels != expected) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "input has %" PRId64 " channels, expected %" PRId64 " (weight and groups)", channels,
                   expected);
  }
  if (bias != NULL) {
    hc_shape shape;
    HC_TRY(hc_tensor_shape(bias, &shape, status));
    if (shape.ndim != 1 || shape.sizes[0] != plan->out.sizes[1] || shape.dtype != input->dtype) {
      return hc_fail(status, HC_ERROR_ARGUMENT,
                     "bias does not fit, expected shape (%" PRId64 ",) and input's dtype",
                     plan->out.sizes[1]);
    }
  }
done:
  return status->code;
}

hc_window hc_convolution_window(const hc_convolution *conv, int64_t d, int64_t kernel) {
  const hc_window window = {
      .kernel = kernel,
      .stride = conv->params.stride[d],
      .pad_lo = conv->pad_lo[d],
      .pad_hi = conv->pad_hi[d],
      .dilation = conv->params.dilation[d],
      .output_padding = conv->params.output_padding[d],
      .transposed = conv->params.transposed,
      .periodic = conv->periodic[d],
  };
  return window;
}

static hc_code work_out_dimension(const hc_convolution *conv, layout *plan, int64_t d, hc_status *status) {
  dimension *dim = &plan->dims[d];
  const hc_window window = hc_convolution_window(conv, d, plan->weight.sizes[2 + d]);
  const hc_axis axis = {
      .dim = 2 + d,
      .size = conv->world[d] > 1 ? conv->size[d] : plan->input.sizes[2 + d],
      .world = conv->world[d],
      .rank = conv->rank[d],
      .periodic = window.periodic,
      .group = conv->group[d],
  };
  HC_TRY(hc_window_check(&window, axis.size, axis.world, status));
  if (axis.rank < 0 || axis.rank >= axis.world) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "rank is %" PRId64 ", expected 0 to %" PRId64, axis.rank,
                   axis.world - 1);
  }
  dim->window = window;
  dim->planned = axis.world > 1 || window.periodic || window.pad_lo != window.pad_hi || window.pad_lo < 0;
  dim->in = axis;
  dim->out = axis;
  dim->out.size = hc_window_out_size(&window, axis.size);
  dim->out.periodic = false;
  dim->in_own = hc_shard(axis.size, axis.world, axis.rank);
  dim->out_own = hc_shard(dim->out.size, axis.world, axis.rank);
  if (plan->input.sizes[2 + d] != hc_length(dim->in_own)) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "the local input has size %" PRId64 " in dim %" PRId64 ", expected %" PRId64
                   ": the shard of rank %" PRId64 " of %" PRId64 " for a global size of %" PRId64,
                   plan->input.sizes[2 + d], 2 + d, hc_length(dim->in_own), axis.rank, axis.world, axis.size);
  }
  plan->out.sizes[2 + d] = hc_length(dim->out_own);
  if (dim->planned) {
    dim->extents = malloc((size_t)axis.world * sizeof *dim->extents);
    if (dim->extents == NULL) {
      return hc_fail(status, HC_ERROR_MEMORY, "out of memory for the plan of %" PRId64 " ranks", axis.world);
    }
  }
done:
  return status->code;
}

static hc_code work_out(const hc_convolution *conv, AtenTensorHandle input, AtenTensorHandle weight,
                        AtenTensorHandle bias, layout *plan, hc_status *status) {
  memset(plan, 0, sizeof *plan);
  plan->nspatial = conv->params.nspatial;
  HC_TRY(hc_tensor_shape(input, &plan->input, status));
  HC_TRY(hc_tensor_shape(weight, &plan->weight, status));
  plan->out = plan->input;
  plan->out.sizes[1] =
      conv->params.transposed ? plan->weight.sizes[1] * conv->params.groups : plan->weight.sizes[0];
  HC_TRY(check_tensors(conv, plan, bias, status));
  for (int64_t d = 0; d < plan->nspatial; ++d) {
    HC_TRY(work_out_dimension(conv, plan, d, status));
  }
  hc_shape_set_strides(&plan->out, hc_shape_is_channels_last(&plan->input));
done:
  return status->code;
}

/* ---- the two window maps, for all ranks ---- */

/* The big side's extents for strips of the small side: exact, so the local convolution pads nothing. */
static void use_reads(dimension *dim, int64_t small_size) {
  for (int64_t rank = 0; rank < dim->in.world; ++rank) {
    dim->extents[rank] = hc_window_reads(&dim->window, hc_shard(small_size, dim->in.world, rank));
  }
  memset(&dim->fit, 0, sizeof dim->fit);
  dim->fit.extent = dim->extents[dim->in.rank];
}

/* The small side's extents for strips of the big side. */
static void use_fits(dimension *dim, int64_t big_size) {
  for (int64_t rank = 0; rank < dim->in.world; ++rank) {
    const hc_fit fit = hc_window_fit(&dim->window, hc_shard(big_size, dim->in.world, rank));
    dim->extents[rank] = fit.extent;
    if (rank == dim->in.rank) {
      dim->fit = fit;
    }
  }
}

/* Exchanges one dimension after the other; the local convolution's paddings come out in `params`. */
static hc_code assemble(layout *plan, AtenTensorHandle tensor, bool of_input, hc_conv_params *params,
                        const char *op, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle current = NULL, next = NULL;
  HC_TRY(hc_tensor_share(tensor, &current, status));
  for (int64_t d = 0; d < plan->nspatial; ++d) {
    dimension *dim = &plan->dims[d];
    if (!dim->planned) {
      params->padding[d] = dim->window.pad_lo;
      continue;
    }
    params->padding[d] = dim->fit.padding;
    params->output_padding[d] = params->transposed ? dim->fit.output_padding : 0;
    HC_TRY(hc_halo_exchange(current, of_input ? &dim->in : &dim->out, dim->extents, dim->fit.lead, 0.0, op,
                            &next, status));
    hc_tensor_free(&current);
    current = next;
    next = NULL;
  }
  *out = current;
  current = NULL;
done:
  hc_tensor_free(&current);
  return status->code;
}

/* ---- strips with cropped ends ---- */

static bool is_cropped(const layout *plan) {
  for (int64_t d = 0; d < plan->nspatial; ++d) {
    if (plan->dims[d].planned && (plan->dims[d].fit.crop_lo > 0 || plan->dims[d].fit.crop_hi > 0)) {
      return true;
    }
  }
  return false;
}

/* Whether some dimension has nothing to convolve: no index of the other side touches the strip. */
static bool is_untouched(const layout *plan) {
  for (int64_t d = 0; d < plan->nspatial; ++d) {
    if (plan->dims[d].planned && hc_length(plan->dims[d].fit.extent) == 0) {
      return true;
    }
  }
  return false;
}

/* A view of the strip without the ends that nothing touches. */
static hc_code crop(const layout *plan, AtenTensorHandle tensor, const hc_shape *shape, AtenTensorHandle *out,
                    hc_status *status) {
  hc_shape part = *shape;
  int64_t offset = 0;
  for (int64_t d = 0; d < plan->nspatial; ++d) {
    const hc_fit *fit = &plan->dims[d].fit;
    if (plan->dims[d].planned) {
      part.sizes[2 + d] -= fit->crop_lo + fit->crop_hi;
      offset += fit->crop_lo * part.strides[2 + d];
    }
  }
  HC_TRY_TORCH(status,
               aoti_torch__reinterpret_tensor(tensor, part.ndim, part.sizes, part.strides, offset, out));
done:
  return status->code;
}

/* A tensor of `shape` that is 0 (or the bias) except for `inner`, which may be NULL, in the uncropped part. */
static hc_code surround(const layout *plan, const hc_shape *shape, AtenTensorHandle bias,
                        AtenTensorHandle inner, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle whole = NULL, part = NULL, spread = NULL;
  HC_TRY(hc_tensor_zeros(shape, &whole, status));
  if (bias != NULL) {
    hc_shape bias_shape;
    HC_TRY(hc_tensor_shape(bias, &bias_shape, status));
    int64_t strides[HC_MAX_DIM] = {0};
    strides[1] = bias_shape.strides[0];
    HC_TRY_TORCH(status,
                 aoti_torch__reinterpret_tensor(bias, shape->ndim, shape->sizes, strides, 0, &spread));
    HC_TRY_TORCH(status, aoti_torch_copy_(whole, spread, 1));
  }
  if (inner != NULL) {
    HC_TRY(crop(plan, whole, shape, &part, status));
    HC_TRY_TORCH(status, aoti_torch_copy_(part, inner, 1));
  }
  *out = whole;
  whole = NULL;
done:
  hc_tensor_free(&whole);
  hc_tensor_free(&part);
  hc_tensor_free(&spread);
  return status->code;
}

/* ---- forward ---- */

hc_code hc_convolution_forward(const hc_convolution *conv, AtenTensorHandle input, AtenTensorHandle weight,
                               AtenTensorHandle bias, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle extended = NULL, result = NULL, whole = NULL;
  hc_conv_params params = conv->params;
  layout plan;
  HC_TRY(work_out(conv, input, weight, bias, &plan, status));
  for (int64_t d = 0; d < plan.nspatial; ++d) {
    if (plan.dims[d].planned && params.transposed) {
      use_fits(&plan.dims[d], plan.dims[d].out.size);
    } else if (plan.dims[d].planned) {
      use_reads(&plan.dims[d], plan.dims[d].out.size);
    }
  }
  HC_TRY(assemble(&plan, input, true, &params, "convolution", &extended, status));
  if (hc_shape_numel(&plan.out) == 0) {
    HC_TRY(hc_tensor_empty(&plan.out, &result, status));
  } else if (is_untouched(&plan)) {
    HC_TRY(surround(&plan, &plan.out, bias, NULL, &result, status));
  } else {
    HC_TRY(hc_tensor_convolution(extended, weight, bias, &params, &result, status));
    if (is_cropped(&plan)) {
      HC_TRY(surround(&plan, &plan.out, bias, result, &whole, status));
      hc_tensor_free(&result);
      result = whole;
      whole = NULL;
    }
    HC_TRY(hc_tensor_make_format(&result, hc_shape_is_channels_last(&plan.input), status));
  }
  *out = result;
  result = NULL;
done:
  hc_tensor_free(&extended);
  hc_tensor_free(&result);
  hc_tensor_free(&whole);
  layout_free(&plan);
  return status->code;
}

/* ---- backward ---- */

static hc_code check_grad_output(const layout *plan, AtenTensorHandle grad_output, hc_status *status) {
  hc_shape grad;
  HC_TRY(hc_tensor_shape(grad_output, &grad, status));
  for (int64_t dim = 0; dim < plan->out.ndim; ++dim) {
    if (grad.ndim != plan->out.ndim || grad.sizes[dim] != plan->out.sizes[dim]) {
      return hc_fail(status, HC_ERROR_ARGUMENT,
                     "the local grad_output has size %" PRId64 " in dim %" PRId64 ", expected %" PRId64,
                     dim < grad.ndim ? grad.sizes[dim] : -1, dim, plan->out.sizes[dim]);
    }
  }
  if (grad.dtype != plan->input.dtype) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "grad_output has another dtype than input, expected the same");
  }
done:
  return status->code;
}

/* The two gradients from an assembled output gradient and the own input strip. */
static hc_code backward_from_grad_halo(layout *plan, hc_conv_params *params, AtenTensorHandle grad_output,
                                       AtenTensorHandle input, AtenTensorHandle weight, bool need_input,
                                       bool need_weight, hc_convolution_grads *grads, hc_status *status) {
  AtenTensorHandle extended = NULL, strip = NULL, inner = NULL;
  for (int64_t d = 0; d < plan->nspatial; ++d) {
    if (plan->dims[d].planned && params->transposed) {
      use_reads(&plan->dims[d], plan->dims[d].in.size);
    } else if (plan->dims[d].planned) {
      use_fits(&plan->dims[d], plan->dims[d].in.size);
    }
  }
  HC_TRY(assemble(plan, grad_output, false, params, "convolution_backward", &extended, status));
  hc_shape extended_shape;
  HC_TRY(hc_tensor_shape(extended, &extended_shape, status));
  if (hc_shape_numel(&plan->input) == 0 || hc_shape_numel(&extended_shape) == 0 || is_untouched(plan)) {
    return HC_OK; /* the caller fills in zeros */
  }
  HC_TRY(crop(plan, input, &plan->input, &strip, status));
  HC_TRY(hc_tensor_convolution_backward(extended, strip, weight, params, need_input, need_weight, &inner,
                                        &grads->weight, status));
  if (need_input && is_cropped(plan)) {
    hc_shape dense = plan->input;
    hc_shape_set_strides(&dense, hc_shape_is_channels_last(&plan->input));
    HC_TRY(surround(plan, &dense, NULL, inner, &grads->input, status));
  } else if (need_input) {
    grads->input = inner;
    inner = NULL;
  }
done:
  hc_tensor_free(&extended);
  hc_tensor_free(&strip);
  hc_tensor_free(&inner);
  return status->code;
}

/* Periodic: the input's halo again, and the gradient of what was borrowed goes home. */
static hc_code backward_from_input_halo(layout *plan, hc_conv_params *params, AtenTensorHandle grad_output,
                                        AtenTensorHandle input, AtenTensorHandle weight, bool need_input,
                                        bool need_weight, hc_convolution_grads *grads, hc_status *status) {
  AtenTensorHandle extended = NULL, current = NULL, next = NULL;
  const char *op = "convolution_backward";
  for (int64_t d = 0; d < plan->nspatial; ++d) {
    if (plan->dims[d].planned) {
      use_reads(&plan->dims[d], plan->dims[d].out.size);
    }
  }
  HC_TRY(assemble(plan, input, true, params, op, &extended, status));
  hc_shape shape;
  HC_TRY(hc_tensor_shape(extended, &shape, status));
  if (hc_shape_numel(&plan->out) > 0 && hc_shape_numel(&shape) > 0) {
    HC_TRY(hc_tensor_convolution_backward(grad_output, extended, weight, params, need_input, need_weight,
                                          &current, &grads->weight, status));
  } else if (need_input) {
    HC_TRY(hc_tensor_zeros(&shape, &current, status));
  }
  for (int64_t d = plan->nspatial - 1; need_input && d >= 0; --d) {
    if (plan->dims[d].planned) {
      HC_TRY(hc_halo_reduce(current, &plan->dims[d].in, plan->dims[d].extents, op, &next, status));
      hc_tensor_free(&current);
      current = next;
      next = NULL;
    }
  }
  grads->input = current;
  current = NULL;
done:
  hc_tensor_free(&extended);
  hc_tensor_free(&current);
  return status->code;
}

/* Zeros where nothing was computed, and the memory format of the tensor that the gradient belongs to. */
static hc_code complete(AtenTensorHandle *grad, const hc_shape *like, hc_status *status) {
  const bool channels_last = hc_shape_is_channels_last(like);
  if (*grad != NULL) {
    return hc_tensor_make_format(grad, channels_last, status);
  }
  hc_shape dense = *like;
  hc_shape_set_strides(&dense, channels_last);
  return hc_tensor_zeros(&dense, grad, status);
}

hc_code hc_convolution_backward(const hc_convolution *conv, AtenTensorHandle grad_output,
                                AtenTensorHandle input, AtenTensorHandle weight, bool need_input,
                                bool need_weight, bool need_bias, hc_convolution_grads *grads,
                                hc_status *status) {
  hc_conv_params params = conv->params;
  layout plan;
  bool periodic = false;
  hc_convolution_grads found = {NULL, NULL, NULL};
  HC_TRY(work_out(conv, input, weight, NULL, &plan, status));
  HC_TRY(check_grad_output(&plan, grad_output, status));
  for (int64_t d = 0; d < plan.nspatial; ++d) {
    periodic = periodic || plan.dims[d].window.periodic;
  }
  if (need_input || need_weight) {
    HC_TRY((periodic ? backward_from_input_halo : backward_from_grad_halo)(
        &plan, &params, grad_output, input, weight, need_input, need_weight, &found, status));
  }
  if (need_input) {
    HC_TRY(complete(&found.input, &plan.input, status));
  }
  if (need_weight) {
    HC_TRY(complete(&found.weight, &plan.weight, status));
  }
  if (need_bias) {
    HC_TRY(hc_tensor_sum_to_channels(grad_output, &found.bias, status));
  }
  *grads = found;
  memset(&found, 0, sizeof found);
done:
  hc_tensor_free(&found.input);
  hc_tensor_free(&found.weight);
  hc_tensor_free(&found.bias);
  layout_free(&plan);
  return status->code;
}
