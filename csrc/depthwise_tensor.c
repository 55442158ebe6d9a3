/* depthwise_tensor: see depthwise_tensor.h. */
#include "depthwise_tensor.h"

#include <stdatomic.h>
#include <string.h>

/* ---- for tests ---- */

enum { AUTO, OFF, ON, MODES };
static const char *const NAMES[MODES] = {"auto", "off", "on"};
static atomic_int mode = AUTO;
static _Atomic int64_t counts[HC_DEPTHWISE_OF_WEIGHT + 1]; /* kernels run on several threads */

bool hc_depthwise_set_mode(const char *name) {
  for (int i = 0; i < MODES; ++i) {
    if (strcmp(name, NAMES[i]) == 0) {
      mode = i;
      return true;
    }
  }
  return false;
}

const char *hc_depthwise_mode(void) { return NAMES[mode]; }

int64_t hc_depthwise_counted(int pass) { return counts[pass]; }

/* ---- whether ---- */

static bool dtype_of(int32_t dtype, hc_depthwise_dtype *out) {
  if (dtype == aoti_torch_dtype_float32()) {
    *out = HC_DEPTHWISE_FLOAT32;
  } else if (dtype == aoti_torch_dtype_float64()) {
    *out = HC_DEPTHWISE_FLOAT64;
  } else if (dtype == aoti_torch_dtype_bfloat16()) {
    *out = HC_DEPTHWISE_BFLOAT16;
  } else {
    return false;
  }
  return true;
}

bool hc_depthwise_wins(const hc_depthwise *conv, bool channels_last, const int64_t *size, int passes) {
  /* WIDE: a line of the image fills vectors several times over. FEW_CHANNELS: ATen's vectors of channels aren't full. */
  enum { WIDE = 32, FEW_CHANNELS = 16, MANY_TAPS = 16 };
  if (size[0] != 1 || size[1] == 1) {
    return false; /* only images have been measured */
  }
  if (conv->dtype == HC_DEPTHWISE_FLOAT64) {
    return true; /* ATen's is several times slower in all passes */
  }
  const int64_t taps = conv->kernel[1] * conv->kernel[2];
  const bool strided = conv->stride[1] > 1 || conv->stride[2] > 1;
  const bool dilated = conv->dilation[1] > 1 || conv->dilation[2] > 1;
  const bool wide = size[2] >= WIDE;
  const bool bfloat16 = conv->dtype == HC_DEPTHWISE_BFLOAT16;
  bool wins = true;
  if (passes & HC_DEPTHWISE_OF_WEIGHT) {
    wins = wins && (taps >= MANY_TAPS || dilated || (channels_last ? bfloat16 : wide && !strided));
  }
  if (passes & HC_DEPTHWISE_OF_INPUT) {
    wins = wins && (channels_last ? bfloat16 || dilated || (conv->channels < FEW_CHANNELS && !strided)
                                  : wide && !strided);
  }
  if (passes & HC_DEPTHWISE_FORWARD) {
    wins = wins && (channels_last ? bfloat16 || (conv->channels < FEW_CHANNELS && !strided)
                                  : wide && (bfloat16 || !strided));
  }
  return wins;
}

bool hc_depthwise_takes(const hc_shape *input, const hc_shape *weight, const hc_shape *other,
                        const hc_conv_params *params, int passes, hc_depthwise *conv) {
  const int64_t n = params->nspatial;
  if (mode == OFF || params->transposed || params->groups <= 1 || input->ndim != n + 2 ||
      weight->ndim != n + 2 || input->sizes[1] != params->groups || weight->sizes[0] != params->groups ||
      weight->sizes[1] != 1 || input->dtype != weight->dtype ||
      (other != NULL && other->dtype != input->dtype) || !hc_shape_on_cpu(input) ||
      !hc_shape_on_cpu(weight) || hc_shape_numel(input) == 0 || hc_shape_numel(weight) == 0 ||
      !dtype_of(input->dtype, &conv->dtype)) {
    return false;
  }
  int64_t size[HC_DEPTHWISE_SPATIAL];
  conv->batch = input->sizes[0];
  conv->channels = input->sizes[1];
  for (int64_t d = 0; d < HC_DEPTHWISE_SPATIAL; ++d) {
    const int64_t of = d - (HC_DEPTHWISE_SPATIAL - n);
    conv->kernel[d] = of < 0 ? 1 : weight->sizes[2 + of];
    conv->stride[d] = of < 0 ? 1 : params->stride[of];
    conv->padding[d] = of < 0 ? 0 : params->padding[of];
    conv->dilation[d] = of < 0 ? 1 : params->dilation[of];
    size[d] = of < 0 ? 1 : input->sizes[2 + of];
    if (conv->stride[d] < 1 || conv->dilation[d] < 1 || conv->padding[d] < 0 ||
        size[d] + 2 * conv->padding[d] <= (conv->kernel[d] - 1) * conv->dilation[d]) {
      return false; /* ATen's to refuse */
    }
  }
  return hc_depthwise_fits(conv) &&
         (mode == ON || hc_depthwise_wins(conv, hc_shape_is_channels_last(input), size, passes));
}

/* ---- tensors ---- */

hc_code hc_depthwise_source_of(AtenTensorHandle tensor, const hc_shape *shape, hc_depthwise_source *source,
                               hc_status *status) {
  const int64_t missing = HC_DEPTHWISE_SPATIAL - (shape->ndim - 2);
  void *data = NULL;
  HC_TRY_TORCH(status, aoti_torch_get_data_ptr(tensor, &data));
  *source = (hc_depthwise_source){.dim = 2, .base = {NULL, data, NULL}};
  source->strides[1][0] = shape->strides[0];
  source->strides[1][1] = shape->strides[1];
  for (int64_t d = 0; d < HC_DEPTHWISE_SPATIAL; ++d) {
    source->sizes[d] = d < missing ? 1 : shape->sizes[2 + d - missing];
    source->strides[1][2 + d] = d < missing ? 0 : shape->strides[2 + d - missing];
  }
  source->bounds[2] = source->bounds[3] = source->sizes[2];
done:
  return status->code;
}

hc_code hc_depthwise_target_of(AtenTensorHandle tensor, const hc_shape *shape, hc_depthwise_target *target,
                               hc_status *status) {
  hc_depthwise_source same = {0};
  HC_TRY(hc_depthwise_source_of(tensor, shape, &same, status));
  HC_TRY_TORCH(status, aoti_torch_get_data_ptr(tensor, &target->base));
  memcpy(target->strides, same.strides[1], sizeof target->strides);
  memset(target->begin, 0, sizeof target->begin);
  memcpy(target->end, same.sizes, sizeof target->end);
done:
  return status->code;
}

hc_code hc_depthwise_weight_of(AtenTensorHandle tensor, const hc_shape *shape, hc_depthwise_weight *weight,
                               hc_status *status) {
  hc_depthwise_source same = {0};
  HC_TRY(hc_depthwise_source_of(tensor, shape, &same, status));
  HC_TRY_TORCH(status, aoti_torch_get_data_ptr(tensor, &weight->base));
  weight->strides[0] = same.strides[1][0];
  memcpy(weight->strides + 1, same.strides[1] + 2, HC_DEPTHWISE_SPATIAL * sizeof *weight->strides);
done:
  return status->code;
}

/* A tensor of the sizes of `shape`, dense in the memory format of `like`. */
static hc_code new_tensor(const hc_shape *shape, const hc_shape *like, hc_shape *dense, AtenTensorHandle *out,
                          hc_status *status) {
  *dense = *shape;
  hc_shape_set_strides(dense, hc_shape_is_channels_last(like));
  return hc_tensor_empty(dense, out, status);
}

hc_code hc_depthwise_try_forward(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle bias,
                                 const hc_conv_params *params, AtenTensorHandle *out, hc_status *status) {
  AtenTensorHandle result = NULL;
  hc_shape input_shape, weight_shape, bias_shape, shape;
  hc_depthwise conv;
  hc_depthwise_source source;
  hc_depthwise_weight taps;
  hc_depthwise_target target;
  void *bias_data = NULL;
  if (params->groups <= 1) { /* most are; the shapes need not be asked for */
    return status->code;
  }
  HC_TRY(hc_tensor_shape(input, &input_shape, status));
  HC_TRY(hc_tensor_shape(weight, &weight_shape, status));
  if (bias != NULL) {
    HC_TRY(hc_tensor_shape(bias, &bias_shape, status));
    HC_TRY_TORCH(status, aoti_torch_get_data_ptr(bias, &bias_data));
  }
  if (!hc_depthwise_takes(&input_shape, &weight_shape, bias == NULL ? NULL : &bias_shape, params,
                          HC_DEPTHWISE_FORWARD, &conv)) {
    goto done;
  }
  shape = input_shape;
  for (int64_t d = 0; d < params->nspatial; ++d) {
    const int64_t reach = params->dilation[d] * (weight_shape.sizes[2 + d] - 1);
    shape.sizes[2 + d] =
        (input_shape.sizes[2 + d] + 2 * params->padding[d] - reach - 1) / params->stride[d] + 1;
  }
  HC_TRY(new_tensor(&shape, &input_shape, &shape, &result, status));
  HC_TRY(hc_depthwise_source_of(input, &input_shape, &source, status));
  HC_TRY(hc_depthwise_weight_of(weight, &weight_shape, &taps, status));
  HC_TRY(hc_depthwise_target_of(result, &shape, &target, status));
  HC_TRY(hc_depthwise_forward(&conv, &source, &taps, bias_data, bias == NULL ? 0 : bias_shape.strides[0],
                              &target, status));
  ++counts[HC_DEPTHWISE_FORWARD];
  *out = result;
  result = NULL;
done:
  hc_tensor_free(&result);
  return status->code;
}

hc_code hc_depthwise_try_backward(AtenTensorHandle grad_output, AtenTensorHandle input,
                                  AtenTensorHandle weight, const hc_conv_params *params, bool need_input,
                                  bool need_weight, AtenTensorHandle *grad_input,
                                  AtenTensorHandle *grad_weight, hc_status *status) {
  AtenTensorHandle of_input = NULL, of_weight = NULL;
  hc_shape input_shape, weight_shape, grad_shape, shape;
  hc_depthwise conv;
  hc_depthwise_source source, grad;
  hc_depthwise_weight taps;
  hc_depthwise_target target;
  if (params->groups <= 1) {
    return status->code;
  }
  HC_TRY(hc_tensor_shape(grad_output, &grad_shape, status));
  HC_TRY(hc_tensor_shape(input, &input_shape, status));
  HC_TRY(hc_tensor_shape(weight, &weight_shape, status));
  need_input = need_input && hc_depthwise_takes(&input_shape, &weight_shape, &grad_shape, params,
                                                HC_DEPTHWISE_OF_INPUT, &conv);
  need_weight = need_weight && hc_depthwise_takes(&input_shape, &weight_shape, &grad_shape, params,
                                                  HC_DEPTHWISE_OF_WEIGHT, &conv);
  if (!need_input && !need_weight) {
    goto done;
  }
  HC_TRY(hc_depthwise_source_of(grad_output, &grad_shape, &grad, status));
  if (need_input) {
    HC_TRY(new_tensor(&input_shape, &input_shape, &shape, &of_input, status));
    HC_TRY(hc_depthwise_weight_of(weight, &weight_shape, &taps, status));
    HC_TRY(hc_depthwise_target_of(of_input, &shape, &target, status));
    HC_TRY(hc_depthwise_input_gradient(&conv, &grad, &taps, &target, status));
    ++counts[HC_DEPTHWISE_OF_INPUT];
  }
  if (need_weight) {
    const int64_t begin[HC_DEPTHWISE_SPATIAL] = {0, 0, 0};
    HC_TRY(new_tensor(&weight_shape, &weight_shape, &shape, &of_weight, status));
    HC_TRY(hc_depthwise_source_of(input, &input_shape, &source, status));
    HC_TRY(hc_depthwise_weight_of(of_weight, &shape, &taps, status));
    HC_TRY(hc_depthwise_weight_gradient(&conv, &source, &grad, begin, grad.sizes, false, &taps, status));
    ++counts[HC_DEPTHWISE_OF_WEIGHT];
  }
  *grad_input = of_input;
  *grad_weight = of_weight;
  of_input = of_weight = NULL;
done:
  hc_tensor_free(&of_input);
  hc_tensor_free(&of_weight);
  return status->code;
}
