/* kernels: see kernels.h. */
#include "kernels.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convolution.h"
#include "stable.h"

/* What each op's arguments mean.
 *
 *   window    [kernel, stride, pad_lo, pad_hi, dilation, output_padding] of the one dimension
 *   extents   begin, end of each rank in turn: what it reads, in global coordinates; it may leave the tensor
 *   padding   pad_lo, pad_hi of each spatial dimension in turn
 *   periodic  0 or 1 for each spatial dimension
 *   dims      the sharded ones; sizes (global), ranks, worlds: one entry for each of them
 *   groups    of the convolution; group, group_names: of ranks, names joined with commas
 */
#define CONVOLUTION_ARGUMENTS                                                                              \
  "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups, int[] " \
  "periodic, "                                                                                             \
  "int[] dims, SymInt[] sizes, int[] ranks, int[] worlds, str group_names"
#define WINDOW_ARGUMENTS "int dim, SymInt size, int[] window, bool transposed, bool periodic"
#define EXTENT_ARGUMENTS "int dim, SymInt size, int[] extents, bool periodic"
#define PLACE_ARGUMENTS  "int rank, int world, str group"

static const char *const SCHEMAS[] = {
    "halo_exchange(Tensor input, " WINDOW_ARGUMENTS ", float fill, " PLACE_ARGUMENTS ") -> Tensor",
    "halo_reduce(Tensor grad, " WINDOW_ARGUMENTS ", " PLACE_ARGUMENTS ") -> Tensor",
    "halo_reduce_(Tensor(a!) grad, " WINDOW_ARGUMENTS ", " PLACE_ARGUMENTS ") -> Tensor(a)",
    "exchange(Tensor input, " EXTENT_ARGUMENTS ", float fill, " PLACE_ARGUMENTS ") -> Tensor",
    "exchange_reduce(Tensor grad, " EXTENT_ARGUMENTS ", " PLACE_ARGUMENTS ") -> Tensor",
    "all_reduce(Tensor input, str reduction, " PLACE_ARGUMENTS ") -> Tensor",
    "convolution(Tensor input, Tensor weight, Tensor[] bias, " CONVOLUTION_ARGUMENTS ") -> Tensor",
    "convolution_backward(Tensor grad_output, Tensor input, Tensor weight, " CONVOLUTION_ARGUMENTS
    ", bool need_input, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
};

/* ---- errors ---- */

/* Raises what `status` says, for the op `name`; where = "rank 1 of 4", or "". Everything must be freed by now. */
static void raise_if_failed(const hc_status *status, const char *name, const char *where) {
  if (status->code != HC_OK) {
    char text[HC_MESSAGE_SIZE + 256];
    (void)snprintf(text, sizeof text, "haloconv::%s%s: %s", name, where, status->message);
    aoti_torch_check(false, name, __FILE__, __LINE__, text);
  }
}

/* ---- halo_exchange, halo_reduce, exchange, exchange_reduce ---- */

typedef struct halo_call {
  hc_axis axis;
  hc_interval *extents; /* owned: one per rank */
  bool planned;         /* whether the extents are known */
} halo_call;

/* place: rank, world, group. Allocates the extents. */
static hc_code read_place(const StableIValue *place, halo_call *call, hc_status *status) {
  call->axis.rank = hc_stable_to_int(place[0]);
  call->axis.world = hc_stable_to_int(place[1]);
  HC_TRY(hc_stable_to_string(place[2], &call->axis.group, status));
  if (call->axis.world < 1 || call->axis.world > HC_LARGEST_WORLD) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "world is %" PRId64 ", expected 1 to %" PRId64,
                   call->axis.world, HC_LARGEST_WORLD);
  }
  if (call->axis.rank < 0 || call->axis.rank >= call->axis.world) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "rank is %" PRId64 ", expected 0 to %" PRId64, call->axis.rank,
                   call->axis.world - 1);
  }
  call->extents = malloc((size_t)call->axis.world * sizeof *call->extents);
  if (call->extents == NULL) {
    return hc_fail(status, HC_ERROR_MEMORY, "out of memory for the plan of %" PRId64 " ranks",
                   call->axis.world);
  }
done:
  return status->code;
}

/* rest: dim, size, window, transposed, periodic. */
static hc_code read_window(const StableIValue *rest, halo_call *call, hc_status *status) {
  int64_t numbers[6], count = 0;
  HC_TRY(hc_stable_to_ints(rest[2], "window", 6, numbers, &count, status));
  if (count != 6) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "window has %" PRId64 " entries, expected 6", count);
  }
  const hc_window window = {
      .kernel = numbers[0],
      .stride = numbers[1],
      .pad_lo = numbers[2],
      .pad_hi = numbers[3],
      .dilation = numbers[4],
      .output_padding = numbers[5],
      .transposed = hc_stable_to_bool(rest[3]),
      .periodic = hc_stable_to_bool(rest[4]),
  };
  call->axis.dim = hc_stable_to_int(rest[0]);
  call->axis.size = hc_stable_to_int(rest[1]);
  call->axis.periodic = window.periodic;
  HC_TRY(hc_window_check(&window, call->axis.size, call->axis.world, status));
  hc_window_extents(&window, call->axis.size, call->axis.world, call->extents);
  call->planned = true;
done:
  return status->code;
}

/* rest: dim, size, extents, periodic. */
static hc_code read_extents(const StableIValue *rest, halo_call *call, hc_status *status) {
  const int64_t expected = 2 * call->axis.world;
  int64_t count = 0, *bounds = malloc((size_t)expected * sizeof *bounds);
  if (bounds == NULL) {
    (void)hc_fail(status, HC_ERROR_MEMORY, "out of memory for %" PRId64 " extents", call->axis.world);
    goto done;
  }
  call->axis.dim = hc_stable_to_int(rest[0]);
  call->axis.size = hc_stable_to_int(rest[1]);
  call->axis.periodic = hc_stable_to_bool(rest[3]);
  HC_TRY(hc_stable_to_ints(rest[2], "extents", expected, bounds, &count, status));
  if (count != expected || call->axis.size < 0) {
    (void)hc_fail(status, HC_ERROR_ARGUMENT,
                  "extents has %" PRId64 " entries and size is %" PRId64 ", expected %" PRId64 " and >= 0",
                  count, call->axis.size, expected);
    goto done;
  }
  for (int64_t rank = 0; rank < call->axis.world; ++rank) {
    const hc_interval extent = {bounds[2 * rank], bounds[2 * rank + 1]};
    if (extent.end < extent.begin || hc_length(extent) > HC_LARGEST || extent.begin < -HC_LARGEST) {
      (void)hc_fail(status, HC_ERROR_ARGUMENT,
                    "the extent of rank %" PRId64 " is [%" PRId64 ", %" PRId64 "), expected an interval",
                    rank, extent.begin, extent.end);
      goto done;
    }
    call->extents[rank] = extent;
  }
  call->planned = true;
done:
  free(bounds);
  return status->code;
}

/* Ends an op: reports a failure to the group, frees the arguments, returns the result or raises. `list` is the index
 * of the int[] argument, 0 where there is none. */
static void finish_halo_call(StableIValue *stack, int list, int group, halo_call *call, AtenTensorHandle out,
                             const char *name, const hc_status *status) {
  char where[64] = "";
  if (status->code != HC_OK && call->axis.world > 1) {
    hc_status second = {HC_OK, ""};
    (void)snprintf(where, sizeof where, " on rank %" PRId64 " of %" PRId64, call->axis.rank,
                   call->axis.world);
    if (call->axis.group == NULL) { /* reading it was what failed: others wait all the same */
      (void)hc_stable_to_string(stack[group], &call->axis.group, &second);
    }
    if (call->axis.group != NULL &&
        (!call->planned ||
         !hc_extents_are_local(call->axis.size, call->axis.world, call->extents, call->axis.periodic))) {
      hc_transport_report(call->axis.group, status->message);
    }
  }
  if (status->code != HC_OK) {
    hc_tensor_free(&out);
  }
  free(call->extents);
  hc_stable_free_tensor(&stack[0]);
  if (list > 0) {
    hc_stable_free_list(&stack[list]);
  }
  hc_stable_free_string(&stack[group]);
  raise_if_failed(status, name, where);
  stack[0] = (StableIValue)(uintptr_t)out;
}

static const halo_call NO_CALL = {{0, 0, 1, 0, false, NULL}, NULL, false};

static void halo_exchange_kernel(StableIValue *stack, uint64_t nargs, uint64_t nouts) {
  hc_status status = {HC_OK, ""};
  halo_call call = NO_CALL;
  AtenTensorHandle out = NULL;
  (void)nargs, (void)nouts;
  HC_TRY(read_place(&stack[7], &call, &status));
  HC_TRY(read_window(&stack[1], &call, &status));
  HC_TRY(hc_halo_exchange(hc_stable_to_tensor(stack[0]), &call.axis, call.extents, 0,
                          hc_stable_to_double(stack[6]), "halo_exchange", &out, &status));
  HC_TRY(hc_tensor_unalias(&out, hc_stable_to_tensor(stack[0]), &status));
done:
  finish_halo_call(stack, 3, 9, &call, out, "halo_exchange", &status);
}

static void halo_reduce_of(StableIValue *stack, bool consume, const char *name) {
  hc_status status = {HC_OK, ""};
  halo_call call = NO_CALL;
  AtenTensorHandle out = NULL;
  HC_TRY(read_place(&stack[6], &call, &status));
  HC_TRY(read_window(&stack[1], &call, &status));
  HC_TRY(hc_halo_reduce(hc_stable_to_tensor(stack[0]), consume, &call.axis, call.extents, "halo_reduce", &out,
                        &status));
done:
  finish_halo_call(stack, 3, 8, &call, out, name, &status);
}

static void halo_reduce_kernel(StableIValue *stack, uint64_t nargs, uint64_t nouts) {
  (void)nargs, (void)nouts;
  halo_reduce_of(stack, false, "halo_reduce");
}

/* The result may lie in the argument's memory, which is overwritten. */
static void halo_reduce_in_place_kernel(StableIValue *stack, uint64_t nargs, uint64_t nouts) {
  (void)nargs, (void)nouts;
  halo_reduce_of(stack, true, "halo_reduce_");
}

static void exchange_kernel(StableIValue *stack, uint64_t nargs, uint64_t nouts) {
  hc_status status = {HC_OK, ""};
  halo_call call = NO_CALL;
  AtenTensorHandle out = NULL;
  (void)nargs, (void)nouts;
  HC_TRY(read_place(&stack[6], &call, &status));
  HC_TRY(read_extents(&stack[1], &call, &status));
  HC_TRY(hc_halo_exchange(hc_stable_to_tensor(stack[0]), &call.axis, call.extents, 0,
                          hc_stable_to_double(stack[5]), "exchange", &out, &status));
  HC_TRY(hc_tensor_unalias(&out, hc_stable_to_tensor(stack[0]), &status));
done:
  finish_halo_call(stack, 3, 8, &call, out, "exchange", &status);
}

static void exchange_reduce_kernel(StableIValue *stack, uint64_t nargs, uint64_t nouts) {
  hc_status status = {HC_OK, ""};
  halo_call call = NO_CALL;
  AtenTensorHandle out = NULL;
  (void)nargs, (void)nouts;
  HC_TRY(read_place(&stack[5], &call, &status));
  HC_TRY(read_extents(&stack[1], &call, &status));
  HC_TRY(hc_halo_reduce(hc_stable_to_tensor(stack[0]), false, &call.axis, call.extents, "exchange_reduce",
                        &out, &status));
done:
  finish_halo_call(stack, 3, 7, &call, out, "exchange_reduce", &status);
}

/* ---- all_reduce ---- */

/* The ranks' tensors come as the rows of one buffer, in rank order: so the result is the same, bit for bit, on all of
 * them. That is the right trade for the few kilobytes of a norm's statistics, for which it is meant. */
static void all_reduce_kernel(StableIValue *stack, uint64_t nargs, uint64_t nouts) {
  hc_status status = {HC_OK, ""};
  halo_call call = NO_CALL;
  AtenTensorHandle row = NULL, rows = NULL, out = NULL;
  const char *reduction = NULL;
  hc_shape shape;
  (void)nargs, (void)nouts;
  HC_TRY(read_place(&stack[2], &call, &status));
  HC_TRY(hc_tensor_shape(hc_stable_to_tensor(stack[0]), &shape, &status));
  HC_TRY(hc_stable_to_string(stack[1], &reduction, &status));
  for (int64_t rank = 0; rank < call.axis.world; ++rank) {
    call.extents[rank] = (hc_interval){0, call.axis.world};
  }
  call.axis.size = call.axis.world;
  call.planned = true;
  HC_TRY(hc_tensor_as_row(hc_stable_to_tensor(stack[0]), &row, &status));
  HC_TRY(hc_halo_exchange(row, &call.axis, call.extents, 0, 0.0, "all_reduce", &rows, &status));
  HC_TRY(hc_tensor_reduce_rows(rows, reduction, &shape, &out, &status));
done:
  hc_tensor_free(&row);
  hc_tensor_free(&rows);
  hc_stable_free_string(&stack[1]);
  finish_halo_call(stack, 0, 4, &call, out, "all_reduce", &status);
}

/* ---- convolution, convolution_backward ---- */

enum { CONVOLUTION_ARGUMENT_COUNT = 12 };

typedef struct convolution_call {
  hc_convolution conv;
  int64_t nsharded, dims[HC_MAX_SPATIAL];
  char *names; /* owned: the group names, cut at the commas */
  int64_t ngroups;
  const char *groups[HC_MAX_SPATIAL]; /* in `names` */
  bool placed; /* whether conv has all of it, so that it knows who waits for this rank */
} convolution_call;

/* Reads an int[] that must have `expected` entries. */
static hc_code read_ints(StableIValue list, const char *what, int64_t expected, int64_t *items,
                         hc_status *status) {
  int64_t count = 0;
  HC_TRY(hc_stable_to_ints(list, what, expected, items, &count, status));
  if (count != expected) {
    return hc_fail(status, HC_ERROR_ARGUMENT, "%s has %" PRId64 " entries, expected %" PRId64, what, count,
                   expected);
  }
done:
  return status->code;
}

/* The groups are read before all else: what fails later is reported to them. */
static hc_code read_groups(StableIValue joined, convolution_call *call, hc_status *status) {
  const char *text = NULL;
  HC_TRY(hc_stable_to_string(joined, &text, status));
  call->names = malloc(strlen(text) + 1);
  if (call->names == NULL) {
    return hc_fail(status, HC_ERROR_MEMORY, "out of memory for the group names");
  }
  memcpy(call->names, text, strlen(text) + 1);
  for (char *rest = call->names; rest != NULL && call->ngroups < HC_MAX_SPATIAL;) {
    call->groups[call->ngroups++] = rest;
    rest = strchr(rest, ',');
    if (rest != NULL) {
      *rest++ = '\0';
    }
  }
done:
  return status->code;
}

static hc_code read_convolution_call(const StableIValue *rest, convolution_call *call, hc_status *status) {
  hc_convolution *conv = &call->conv;
  int64_t padding[2 * HC_MAX_SPATIAL], periodic[HC_MAX_SPATIAL], n = 0;
  int64_t sizes[HC_MAX_SPATIAL], ranks[HC_MAX_SPATIAL], worlds[HC_MAX_SPATIAL];
  HC_TRY(read_groups(rest[11], call, status));
  HC_TRY(hc_stable_to_ints(rest[0], "stride", HC_MAX_SPATIAL, conv->params.stride, &n, status));
  conv->params.nspatial = n;
  HC_TRY(read_ints(rest[1], "padding", 2 * n, padding, status));
  HC_TRY(read_ints(rest[2], "dilation", n, conv->params.dilation, status));
  conv->params.transposed = hc_stable_to_bool(rest[3]);
  HC_TRY(read_ints(rest[4], "output_padding", n, conv->params.output_padding, status));
  conv->params.groups = hc_stable_to_int(rest[5]);
  HC_TRY(read_ints(rest[6], "periodic", n, periodic, status));
  for (int64_t d = 0; d < n; ++d) {
    conv->pad_lo[d] = padding[2 * d];
    conv->pad_hi[d] = padding[2 * d + 1];
    conv->periodic[d] = periodic[d] != 0;
    conv->world[d] = 1;
  }
  HC_TRY(hc_stable_to_ints(rest[7], "dims", n, call->dims, &call->nsharded, status));
  HC_TRY(read_ints(rest[8], "sizes", call->nsharded, sizes, status));
  HC_TRY(read_ints(rest[9], "ranks", call->nsharded, ranks, status));
  HC_TRY(read_ints(rest[10], "worlds", call->nsharded, worlds, status));
  if (call->ngroups < call->nsharded) {
    return hc_fail(status, HC_ERROR_ARGUMENT,
                   "group_names has %" PRId64 " names, expected one for each of %" PRId64 " dims",
                   call->ngroups, call->nsharded);
  }
  for (int64_t i = 0; i < call->nsharded; ++i) {
    const int64_t d = call->dims[i] - 2;
    if (d < 0 || d >= n) {
      return hc_fail(status, HC_ERROR_ARGUMENT, "dims has %" PRId64 ", expected 2 to %" PRId64, call->dims[i],
                     n + 1);
    }
    conv->size[d] = sizes[i];
    conv->rank[d] = ranks[i];
    conv->world[d] = worlds[i];
    conv->group[d] = call->groups[i];
  }
  call->placed = true;
done:
  return status->code;
}

/* Whether the convolution exchanges nothing in spatial dimension d, so that no rank waits for this one. */
static bool sends_nothing(const hc_convolution *conv, int64_t d, AtenTensorHandle weight) {
  hc_status ignored = {HC_OK, ""};
  hc_shape shape;
  hc_interval *extents = NULL;
  bool result = false;
  HC_TRY(hc_tensor_shape(weight, &shape, &ignored));
  if (2 + d >= shape.ndim) {
    return false;
  }
  const hc_window window = hc_convolution_window(conv, d, shape.sizes[2 + d]);
  HC_TRY(hc_window_check(&window, conv->size[d], conv->world[d], &ignored));
  extents = malloc((size_t)conv->world[d] * sizeof *extents);
  if (extents != NULL) {
    hc_window_extents(&window, conv->size[d], conv->world[d], extents);
    result = hc_extents_are_local(conv->size[d], conv->world[d], extents, window.periodic);
  }
done:
  free(extents);
  return result;
}

/* Reports a failure to the groups whose ranks may wait for this one, and says where it happened. What failed before all
 * arguments were read goes to every group that is named. */
static void report_convolution_call(StableIValue joined, convolution_call *call, AtenTensorHandle weight,
                                    const hc_status *status, char *where, size_t room) {
  where[0] = '\0';
  if (status->code != HC_OK && !call->placed) {
    hc_status second = {HC_OK, ""};
    if (call->names == NULL) { /* reading them may be what failed: others wait all the same */
      (void)read_groups(joined, call, &second);
    }
    for (int64_t i = 0; i < call->ngroups; ++i) {
      if (call->groups[i][0] != '\0' && (i == 0 || strcmp(call->groups[i], call->groups[i - 1]) != 0)) {
        hc_transport_report(call->groups[i], status->message);
      }
    }
    return;
  }
  for (int64_t d = 0; status->code != HC_OK && d < call->conv.params.nspatial; ++d) {
    if (call->conv.world[d] > 1 && call->conv.group[d] != NULL) {
      const size_t used = strlen(where);
      (void)snprintf(where + used, room - used, "%s rank %" PRId64 " of %" PRId64 " in dim %" PRId64,
                     used == 0 ? " on" : ",", call->conv.rank[d], call->conv.world[d], 2 + d);
      if (!sends_nothing(&call->conv, d, weight)) {
        hc_transport_report(call->conv.group[d], status->message);
      }
    }
  }
}

static void free_convolution_arguments(StableIValue *rest) {
  static const int lists[] = {0, 1, 2, 4, 6, 7, 8, 9, 10};
  for (size_t i = 0; i < sizeof lists / sizeof *lists; ++i) {
    hc_stable_free_list(&rest[lists[i]]);
  }
  hc_stable_free_string(&rest[CONVOLUTION_ARGUMENT_COUNT - 1]);
}

static void convolution_kernel(StableIValue *stack, uint64_t nargs, uint64_t nouts) {
  hc_status status = {HC_OK, ""};
  convolution_call call;
  AtenTensorHandle bias = NULL, out = NULL;
  char where[192];
  (void)nargs, (void)nouts;
  memset(&call, 0, sizeof call);
  HC_TRY(read_convolution_call(&stack[3], &call, &status));
  HC_TRY(hc_stable_to_optional_tensor(stack[2], &bias, &status));
  HC_TRY(hc_convolution_forward(&call.conv, hc_stable_to_tensor(stack[0]), hc_stable_to_tensor(stack[1]),
                                bias, &out, &status));
done:
  report_convolution_call(stack[14], &call, hc_stable_to_tensor(stack[1]), &status, where, sizeof where);
  hc_tensor_free(&bias);
  hc_stable_free_tensor(&stack[0]);
  hc_stable_free_tensor(&stack[1]);
  hc_stable_free_tensor_list(&stack[2]);
  free_convolution_arguments(&stack[3]);
  free(call.names);
  raise_if_failed(&status, "convolution", where);
  stack[0] = (StableIValue)(uintptr_t)out;
}

static void convolution_backward_kernel(StableIValue *stack, uint64_t nargs, uint64_t nouts) {
  hc_status status = {HC_OK, ""};
  convolution_call call;
  hc_convolution_grads grads = {NULL, NULL, NULL};
  char where[192];
  AtenTensorHandle grad_output = hc_stable_to_tensor(stack[0]);
  const StableIValue *needs = &stack[3 + CONVOLUTION_ARGUMENT_COUNT];
  (void)nargs, (void)nouts;
  memset(&call, 0, sizeof call);
  HC_TRY(read_convolution_call(&stack[3], &call, &status));
  HC_TRY(hc_convolution_backward(&call.conv, grad_output, hc_stable_to_tensor(stack[1]),
                                 hc_stable_to_tensor(stack[2]), hc_stable_to_bool(needs[0]),
                                 hc_stable_to_bool(needs[1]), hc_stable_to_bool(needs[2]), &grads, &status));
  HC_TRY(hc_tensor_absent(grad_output, &grads.input, &status));
  HC_TRY(hc_tensor_absent(grad_output, &grads.weight, &status));
  HC_TRY(hc_tensor_absent(grad_output, &grads.bias, &status));
done:
  report_convolution_call(stack[14], &call, hc_stable_to_tensor(stack[2]), &status, where, sizeof where);
  for (int i = 0; i < 3; ++i) {
    hc_stable_free_tensor(&stack[i]);
  }
  free_convolution_arguments(&stack[3]);
  free(call.names);
  if (status.code != HC_OK) {
    hc_tensor_free(&grads.input);
    hc_tensor_free(&grads.weight);
    hc_tensor_free(&grads.bias);
  }
  raise_if_failed(&status, "convolution_backward", where);
  stack[0] = (StableIValue)(uintptr_t)grads.input;
  stack[1] = (StableIValue)(uintptr_t)grads.weight;
  stack[2] = (StableIValue)(uintptr_t)grads.bias;
}

/* ---- registration ---- */

typedef void (*boxed_kernel)(StableIValue *, uint64_t, uint64_t);

static hc_code register_for(const char *dispatch_key, hc_status *status) {
  static const struct {
    const char *name;
    boxed_kernel kernel;
  } kernels[] = {
      {"halo_exchange", halo_exchange_kernel},       {"halo_reduce", halo_reduce_kernel},
      {"halo_reduce_", halo_reduce_in_place_kernel}, {"exchange", exchange_kernel},
      {"exchange_reduce", exchange_reduce_kernel},   {"all_reduce", all_reduce_kernel},
      {"convolution", convolution_kernel},           {"convolution_backward", convolution_backward_kernel},
  };
  TorchLibraryHandle library = NULL; /* never freed: its registrations live as long as the process */
  HC_TRY_TORCH(status, aoti_torch_library_init_impl("haloconv", dispatch_key, __FILE__, __LINE__, &library));
  for (size_t i = 0; i < sizeof kernels / sizeof *kernels; ++i) {
    HC_TRY_TORCH(status,
                 torch_library_impl(library, kernels[i].name, kernels[i].kernel, HC_TORCH_ABI_VERSION));
  }
done:
  return status->code;
}

hc_code hc_kernels_register(hc_status *status) {
  TorchLibraryHandle library = NULL; /* never freed, likewise */
  HC_TRY_TORCH(status, aoti_torch_library_init_fragment("haloconv", __FILE__, __LINE__, &library));
  for (size_t i = 0; i < sizeof SCHEMAS / sizeof *SCHEMAS; ++i) {
    HC_TRY_TORCH(status, aoti_torch_library_def(library, SCHEMAS[i]));
  }
  HC_TRY(register_for("CPU", status));
  HC_TRY(register_for("CUDA", status));
done:
  return status->code;
}
