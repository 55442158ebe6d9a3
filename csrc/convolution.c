/* convolution: see convolution.h. */
#include "convolution.h"

#include <inttypes.h>
#include <string.h>

#include "convolution_fast.h"

/* ---- strips with cropped ends ---- */

static bool is_cropped(const hc_layout *layout) {
  for (int64_t d = 0; d < layout->nspatial; ++d) {
    if (layout->dims[d].planned && (layout->dims[d].fit.crop_lo > 0 || layout->dims[d].fit.crop_hi > 0)) {
      return true;
    }
  }
  return false;
}

/* Whether some dimension has nothing to convolve: no index of the other side touches the strip. */
static bool is_untouched(const hc_layout *layout) {
  for (int64_t d = 0; d < layout->nspatial; ++d) {
    if (layout->dims[d].planned && hc_length(layout->dims[d].fit.extent) == 0) {
      return true;
    }
  }
  return false;
}

/* A view of the strip without the ends that nothing touches. */
static hc_code crop(const hc_layout *layout, AtenTensorHandle tensor, const hc_shape *shape,
                    AtenTensorHandle *out, hc_status *status) {
  hc_shape part = *shape;
  int64_t offset = 0;
  for (int64_t d = 0; d < layout->nspatial; ++d) {
    const hc_fit *fit = &layout->dims[d].fit;
    if (layout->dims[d].planned) {
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
static hc_code surround(const hc_layout *layout, const hc_shape *shape, AtenTensorHandle bias,
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
    HC_TRY(crop(layout, whole, shape, &part, status));
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

static hc_code forward_general(hc_layout *layout, hc_conv_params *params, AtenTensorHandle input,
                               AtenTensorHandle weight, AtenTensorHandle bias, AtenTensorHandle *out,
                               hc_status *status) {
  AtenTensorHandle extended = NULL, inner = NULL;
  HC_TRY(hc_layout_assemble(layout, input, true, -1, params, "convolution", &extended, status));
  if (hc_shape_numel(&layout->out) == 0) {
    HC_TRY(hc_tensor_empty(&layout->out, out, status));
  } else if (is_untouched(layout)) {
    HC_TRY(surround(layout, &layout->out, bias, NULL, out, status));
  } else if (is_cropped(layout)) {
    HC_TRY(hc_tensor_convolution(extended, weight, bias, params, &inner, status));
    HC_TRY(surround(layout, &layout->out, bias, inner, out, status));
  } else {
    HC_TRY(hc_tensor_convolution(extended, weight, bias, params, out, status));
  }
done:
  hc_tensor_free(&extended);
  hc_tensor_free(&inner);
  return status->code;
}

static hc_code forward_fast(hc_layout *layout, const hc_fast *fast, hc_conv_params *params,
                            AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle bias,
                            AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle extended = NULL; /* in the other dimensions */
  HC_TRY(hc_layout_assemble(layout, input, true, fast->d, params, "convolution", &extended, status));
  HC_TRY(hc_fast_forward(layout, fast, params, extended, weight, bias, out, status));
done:
  hc_tensor_free(&extended);
  return status->code;
}

hc_code hc_convolution_forward(const hc_convolution *conv, AtenTensorHandle input, AtenTensorHandle weight,
                               AtenTensorHandle bias, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle result = NULL;
  hc_conv_params params = conv->params;
  hc_layout layout;
  hc_fast fast;
  HC_TRY(hc_layout_init(conv, input, weight, bias, &layout, status));
  if (params.transposed) {
    hc_layout_use_fits(&layout);
  } else {
    hc_layout_use_reads(&layout);
  }
  if (hc_fast_choose_forward(&layout, &fast)) {
    HC_TRY(forward_fast(&layout, &fast, &params, input, weight, bias, &result, status));
  } else {
    HC_TRY(forward_general(&layout, &params, input, weight, bias, &result, status));
  }
  HC_TRY(hc_tensor_make_format(&result, hc_shape_is_channels_last(&layout.input), status));
  *out = result;
  result = NULL;
done:
  hc_tensor_free(&result);
  hc_layout_free(&layout);
  return status->code;
}

/* ---- backward ---- */

static hc_code check_grad_output(const hc_layout *layout, AtenTensorHandle grad_output, hc_status *status) {
  hc_shape grad;
  HC_TRY(hc_tensor_shape(grad_output, &grad, status));
  for (int64_t dim = 0; dim < layout->out.ndim; ++dim) {
    if (grad.ndim != layout->out.ndim || grad.sizes[dim] != layout->out.sizes[dim]) {
      return hc_fail(status, HC_ERROR_ARGUMENT,
                     "the local grad_output has size %" PRId64 " in dim %" PRId64 ", expected %" PRId64,
                     dim < grad.ndim ? grad.sizes[dim] : -1, dim, layout->out.sizes[dim]);
    }
  }
  if (grad.dtype != layout->input.dtype) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "grad_output has another dtype than input, expected the same");
  }
done:
  return status->code;
}

/* The two gradients from the output gradient's halo and the own input strip. */
static hc_code backward_from_grad_halo(hc_layout *layout, hc_conv_params *params,
                                       AtenTensorHandle grad_output, AtenTensorHandle input,
                                       AtenTensorHandle weight, bool need_input, bool need_weight,
                                       hc_convolution_grads *grads, hc_status *status) {
  AtenTensorHandle extended = NULL, strip = NULL, inner = NULL;
  hc_fast fast;
  if (params->transposed) {
    hc_layout_use_reads(layout);
  } else {
    hc_layout_use_fits(layout);
  }
  const bool is_fast = hc_fast_choose_backward(layout, &fast);
  HC_TRY(hc_layout_assemble(layout, grad_output, false, is_fast ? fast.d : -1, params, "convolution_backward",
                            &extended, status));
  if (is_fast) { /* it takes the shard as it lies */
    layout->dims[fast.d].fit.crop_lo = layout->dims[fast.d].fit.crop_hi = 0;
  }
  hc_shape extended_shape;
  HC_TRY(hc_tensor_shape(extended, &extended_shape, status));
  if (hc_shape_numel(&layout->input) == 0 || hc_shape_numel(&extended_shape) == 0 || is_untouched(layout)) {
    goto done; /* the caller fills in zeros */
  }
  HC_TRY(crop(layout, input, &layout->input, &strip, status));
  if (is_fast) {
    HC_TRY(hc_fast_backward(layout, &fast, params, extended, strip, weight, need_input, need_weight, &inner,
                            &grads->weight, status));
  } else {
    HC_TRY(hc_tensor_convolution_backward(extended, strip, weight, params, need_input, need_weight, &inner,
                                          &grads->weight, status));
  }
  if (need_input && is_cropped(layout)) {
    hc_shape dense = layout->input;
    hc_shape_set_strides(&dense, hc_shape_is_channels_last(&layout->input));
    HC_TRY(surround(layout, &dense, NULL, inner, &grads->input, status));
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
static hc_code backward_from_input_halo(hc_layout *layout, hc_conv_params *params,
                                        AtenTensorHandle grad_output, AtenTensorHandle input,
                                        AtenTensorHandle weight, bool need_input, bool need_weight,
                                        hc_convolution_grads *grads, hc_status *status) {
  AtenTensorHandle extended = NULL, current = NULL, next = NULL;
  const char *op = "convolution_backward";
  hc_layout_use_reads(layout);
  HC_TRY(hc_layout_assemble(layout, input, true, -1, params, op, &extended, status));
  hc_shape shape;
  HC_TRY(hc_tensor_shape(extended, &shape, status));
  if (hc_shape_numel(&layout->out) > 0 && hc_shape_numel(&shape) > 0) {
    HC_TRY(hc_tensor_convolution_backward(grad_output, extended, weight, params, need_input, need_weight,
                                          &current, &grads->weight, status));
  } else if (need_input) {
    HC_TRY(hc_tensor_zeros(&shape, &current, status));
  }
  for (int64_t d = layout->nspatial - 1; need_input && d >= 0; --d) {
    if (layout->dims[d].planned) {
      HC_TRY(hc_halo_reduce(current, true, &layout->dims[d].in, layout->dims[d].extents, op, &next, status));
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
  hc_layout layout;
  bool periodic = false;
  hc_convolution_grads found = {NULL, NULL, NULL};
  HC_TRY(hc_layout_init(conv, input, weight, NULL, &layout, status));
  HC_TRY(check_grad_output(&layout, grad_output, status));
  for (int64_t d = 0; d < layout.nspatial; ++d) {
    periodic = periodic || layout.dims[d].window.periodic;
  }
  if (need_input || need_weight) {
    HC_TRY((periodic ? backward_from_input_halo : backward_from_grad_halo)(
        &layout, &params, grad_output, input, weight, need_input, need_weight, &found, status));
  }
  if (need_input) {
    HC_TRY(complete(&found.input, &layout.input, status));
  }
  if (need_weight) {
    HC_TRY(complete(&found.weight, &layout.weight, status));
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
  hc_layout_free(&layout);
  return status->code;
}
