/* module: haloconv._C, the CPython side. Limited API: one binary for every Python from 3.10 on.
 *
 * Importing it registers the ops (kernels.c). What it holds itself is the plan, as plain tuples, and what tests want to
 * switch and to see: the convolution's path and, in a test build, faults. Python wraps the plan; users do not import
 * this module.
 *
 * The environment variables HALOCONV_CONV_PATH (auto, general, fast), HALOCONV_DEPTHWISE (auto, off, on) and
 * HALOCONV_CUDA_LIBRARY are read once, at import.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#include "convolution_fast.h"
#include "device.h"
#include "depthwise_tensor.h"
#include "kernels.h"
#include "module_transport.h"
#include "plan.h"
#include "resize.h"

static PyObject *pieces_to_list(const hc_piece *pieces, int64_t count) {
  PyObject *list = PyList_New(0);
  for (int64_t i = 0; list != NULL && i < count; ++i) {
    PyObject *item = Py_BuildValue("(LLL)", (long long)pieces[i].peer, (long long)pieces[i].begin,
                                   (long long)pieces[i].end);
    if (item == NULL || PyList_Append(list, item) != 0) {
      Py_CLEAR(list);
    }
    Py_XDECREF(item);
  }
  return list;
}

/* One rank's tuple: (owned_in, owned_out, needed, pad_left, pad_right, sends, recvs). */
static PyObject *rank_to_tuple(const hc_window *window, int64_t size, int64_t world, int64_t rank,
                               const hc_interval *extents) {
  hc_status status = {HC_OK, ""};
  hc_route route = {.keeps = NULL};
  PyObject *sends = NULL, *recvs = NULL, *result = NULL;
  const hc_interval out = hc_shard(hc_window_out_size(window, size), world, rank);
  if (hc_route_build(size, world, rank, extents, window->periodic, &route, &status) != HC_OK) {
    PyErr_NoMemory();
    goto done;
  }
  hc_interval needed = route.extent;
  int64_t pad_left = 0, pad_right = 0;
  if (!window->periodic && !window->transposed) {
    pad_left = hc_max(0, hc_min(needed.end, 0) - needed.begin);
    pad_right = hc_max(0, needed.end - hc_max(needed.begin, size));
    needed.begin = hc_max(0, hc_min(needed.begin, size));
    needed.end = hc_max(0, hc_min(needed.end, size));
  }
  sends = pieces_to_list(route.sends, route.nsends);
  recvs = pieces_to_list(route.recvs, route.nrecvs);
  if (sends != NULL && recvs != NULL) {
    result = Py_BuildValue("((LL)(LL)(LL)LLOO)", (long long)route.owned.begin, (long long)route.owned.end,
                           (long long)out.begin, (long long)out.end, (long long)needed.begin,
                           (long long)needed.end, (long long)pad_left, (long long)pad_right, sends, recvs);
  }
done:
  Py_XDECREF(sends);
  Py_XDECREF(recvs);
  hc_route_free(&route);
  return result;
}

static PyObject *plan(PyObject *self, PyObject *args) {
  long long size, world, kernel, stride, pad_lo, pad_hi, dilation, output_padding;
  int transposed, periodic;
  hc_status status = {HC_OK, ""};
  hc_interval *extents = NULL;
  PyObject *ranks = NULL, *result = NULL;
  (void)self;
  if (!PyArg_ParseTuple(args, "LLLLLLLLpp", &size, &world, &kernel, &stride, &pad_lo, &pad_hi, &dilation,
                        &output_padding, &transposed, &periodic)) {
    return NULL;
  }
  const hc_window window = {kernel,   stride,         pad_lo,          pad_hi,
                            dilation, output_padding, transposed != 0, periodic != 0};
  if (hc_window_check(&window, size, world, &status) != HC_OK) {
    PyErr_SetString(PyExc_ValueError, status.message);
    return NULL;
  }
  extents = malloc((size_t)world * sizeof *extents);
  ranks = PyList_New(0);
  if (extents == NULL || ranks == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  hc_window_extents(&window, size, world, extents);
  for (int64_t rank = 0; rank < world; ++rank) {
    PyObject *item = rank_to_tuple(&window, size, world, rank, extents);
    const int failed = item == NULL || PyList_Append(ranks, item) != 0;
    Py_XDECREF(item);
    if (failed) {
      goto done;
    }
  }
  result = Py_BuildValue("(LO)", (long long)hc_window_out_size(&window, size), ranks);
done:
  free(extents);
  Py_XDECREF(ranks);
  return result;
}

/* The first arguments of resize and resize_reads. A scale of None is none. */
static int parse_resize(const char *mode, long long in_size, long long out_size, int align_corners,
                        PyObject *scale, int single_precision, int channels_last, int fused, hc_resize *r) {
  hc_status status = {HC_OK, ""};
  *r = (hc_resize){HC_RESIZE_NEAREST,  in_size,   out_size, align_corners != 0, 0, single_precision != 0,
                   channels_last != 0, fused != 0};
  if (scale != Py_None) {
    r->scale = PyFloat_AsDouble(scale);
    if (PyErr_Occurred() != NULL) {
      return -1;
    }
  }
  if (hc_resize_mode_parse(mode, &r->mode, &status) != HC_OK || hc_resize_check(r, &status) != HC_OK) {
    PyErr_SetString(PyExc_ValueError, status.message);
    return -1;
  }
  return 0;
}

static PyObject *resize(PyObject *self, PyObject *args) {
  const char *mode;
  long long in_size, out_size;
  int align_corners, single_precision, channels_last = 0, fused = 1;
  PyObject *scale, *result = NULL;
  int64_t *index = NULL;
  double *weight = NULL;
  hc_resize r;
  (void)self;
  if (!PyArg_ParseTuple(args, "sLLpOp|pp", &mode, &in_size, &out_size, &align_corners, &scale,
                        &single_precision, &channels_last, &fused) ||
      parse_resize(mode, in_size, out_size, align_corners, scale, single_precision, channels_last, fused,
                   &r) != 0) {
    return NULL;
  }
  const int64_t taps = hc_resize_tap_count(&r);
  if (taps > PY_SSIZE_T_MAX / (int64_t)(sizeof *index + sizeof *weight) / r.out) {
    return PyErr_NoMemory();
  }
  const size_t count = (size_t)(taps * r.out);
  index = malloc(count * sizeof *index);
  weight = malloc(count * sizeof *weight);
  if (index == NULL || weight == NULL) {
    PyErr_NoMemory();
    goto done;
  }
  const hc_interval all = {0, r.out};
  hc_resize_taps(&r, all, taps, index, weight);
  result = Py_BuildValue("(Ly#y#)", (long long)taps, (const char *)index, (Py_ssize_t)(count * sizeof *index),
                         (const char *)weight, (Py_ssize_t)(count * sizeof *weight));
done:
  free(index);
  free(weight);
  return result;
}

static PyObject *resize_reads(PyObject *self, PyObject *args) {
  const char *mode;
  long long in_size, out_size, begin, end;
  int align_corners, single_precision, channels_last, fused;
  PyObject *scale;
  hc_resize r;
  (void)self;
  if (!PyArg_ParseTuple(args, "sLLpOpppLL", &mode, &in_size, &out_size, &align_corners, &scale,
                        &single_precision, &channels_last, &fused, &begin, &end) ||
      parse_resize(mode, in_size, out_size, align_corners, scale, single_precision, channels_last, fused,
                   &r) != 0) {
    return NULL;
  }
  if (begin < 0 || begin > end || end > out_size) {
    return PyErr_Format(PyExc_ValueError,
                        "begin and end are %lld and %lld, expected 0 <= begin <= end <= %lld", begin, end,
                        out_size);
  }
  const hc_interval out = {begin, end};
  const hc_interval reads = hc_resize_reads(&r, out);
  return Py_BuildValue("(LL)", (long long)reads.begin, (long long)reads.end);
}

static PyObject *convolution_path(PyObject *self, PyObject *args) {
  const char *before = hc_fast_path(), *name = before;
  (void)self;
  if (!PyArg_ParseTuple(args, "|s", &name)) {
    return NULL;
  }
  if (!hc_fast_set_path(name)) {
    return PyErr_Format(PyExc_ValueError, "name is '%s', expected 'auto', 'general' or 'fast'", name);
  }
  return PyUnicode_FromString(before);
}

static PyObject *depthwise(PyObject *self, PyObject *args) {
  const char *before = hc_depthwise_mode(), *name = before;
  (void)self;
  if (!PyArg_ParseTuple(args, "|s", &name)) {
    return NULL;
  }
  if (!hc_depthwise_set_mode(name)) {
    return PyErr_Format(PyExc_ValueError, "name is '%s', expected 'auto', 'off' or 'on'", name);
  }
  return PyUnicode_FromString(before);
}

static PyObject *depthwise_counts(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return Py_BuildValue("{sLsLsL}", "forward", (long long)hc_depthwise_counted(HC_DEPTHWISE_FORWARD),
                       "input_gradient", (long long)hc_depthwise_counted(HC_DEPTHWISE_OF_INPUT),
                       "weight_gradient", (long long)hc_depthwise_counted(HC_DEPTHWISE_OF_WEIGHT));
}

static PyObject *path_counts(PyObject *self, PyObject *args) {
  static const char *const names[HC_COUNTS] = {
      [HC_COUNT_FORWARD_FAST] = "forward_fast",         [HC_COUNT_FORWARD_GENERAL] = "forward_general",
      [HC_COUNT_FORWARD_STRIPS] = "forward_strips",     [HC_COUNT_BACKWARD_FAST] = "backward_fast",
      [HC_COUNT_BACKWARD_GENERAL] = "backward_general", [HC_COUNT_BACKWARD_STRIPS] = "backward_strips",
  };
  PyObject *result = PyDict_New();
  (void)self, (void)args;
  for (int i = 0; result != NULL && i < HC_COUNTS; ++i) {
    PyObject *count = PyLong_FromLongLong((long long)hc_fast_counted((hc_fast_count)i));
    if (count == NULL || PyDict_SetItemString(result, names[i], count) != 0) {
      Py_CLEAR(result);
    }
    Py_XDECREF(count);
  }
  return result;
}

/* None, or a text as a str. */
static PyObject *text_or_none(const char *text) {
  if (text == NULL) {
    Py_RETURN_NONE;
  }
  return PyUnicode_FromString(text);
}

static PyObject *cuda_library(PyObject *self, PyObject *args) {
  const hc_device_library *loaded = hc_device_loaded();
  const hc_cuda_about *about = &loaded->about;
  (void)self, (void)args;
  return Py_BuildValue("{s:N,s:N,s:N,s:i,s:i,s:s}", "path", text_or_none(loaded->path), "reason",
                       text_or_none(loaded->reason), "for_tests", PyBool_FromLong(about->host), "runtime",
                       (int)about->runtime_version, "driver", (int)about->driver_version, "archs",
                       about->archs);
}

static PyObject *cuda_device(PyObject *self, PyObject *args) {
  int index;
  (void)self;
  return PyArg_ParseTuple(args, "i", &index) ? text_or_none(hc_device_reason(index)) : NULL;
}

#ifdef HC_FAULTS
static PyObject *fault_arm(PyObject *self, PyObject *args) {
  long long n;
  (void)self;
  if (!PyArg_ParseTuple(args, "L", &n)) {
    return NULL;
  }
  hc_fault_arm(n);
  Py_RETURN_NONE;
}
#endif

static PyMethodDef methods[] = {
    {"plan", plan, METH_VARARGS,
     "plan(size, world, kernel, stride, pad_lo, pad_hi, dilation, output_padding, transposed, periodic)\n"
     "-> (out_size, [(owned_in, owned_out, needed, pad_left, pad_right, sends, recvs), ...])"},
    {"resize", resize, METH_VARARGS,
     "resize(mode, in_size, out_size, align_corners, scale, single_precision, channels_last=False, "
     "fused=True)\n"
     "-> (taps, index, weight): bytes, int64[out_size * taps] and float64[out_size * taps]"},
    {"resize_reads", resize_reads, METH_VARARGS,
     "resize_reads(mode, in_size, out_size, align_corners, scale, single_precision, channels_last, fused, "
     "begin, end)\n"
     "-> (begin, end): the inputs that the outputs [begin, end) read"},
    {"convolution_path", convolution_path, METH_VARARGS,
     "convolution_path(name=None) -> the path before. For tests: which path convolutions take from now on, "
     "'auto', "
     "'general' or 'fast'. Initially HALOCONV_CONV_PATH, or 'auto'."},
    {"path_counts", path_counts, METH_NOARGS,
     "path_counts() -> dict. For tests: how many convolutions took which path since the process began, "
     "forward and "
     "backward, and how many of them had strips to mend."},
    {"cuda_library", cuda_library, METH_NOARGS,
     "cuda_library() -> dict: the path of the CUDA kernels' library or None and the reason, CUDA's version "
     "that it "
     "was built with and that of the driver (13000 for 13.0, 0 for none), the architectures"},
    {"cuda_device", cuda_device, METH_VARARGS,
     "cuda_device(index) -> why the kernels don't run on that device, or None"},
    {"depthwise", depthwise, METH_VARARGS,
     "depthwise(name=None) -> the mode before. For tests: which depthwise convolutions of CPU tensors "
     "haloconv's own "
     "loops run from now on: 'auto', where they are faster than ATen's, 'off', or 'on', wherever they can. "
     "Initially HALOCONV_DEPTHWISE, or 'auto'."},
    {"depthwise_counts", depthwise_counts, METH_NOARGS,
     "depthwise_counts() -> dict. For tests: how many passes those loops have run since the process began."},
#ifdef HC_FAULTS
    {"fault_arm", fault_arm, METH_VARARGS,
     "fault_arm(n): the n-th checked libtorch call from now on fails; 0: none"},
#endif
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "haloconv._C", "The C core of haloconv.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__C(void);

PyMODINIT_FUNC PyInit__C(void) {
  hc_status status = {HC_OK, ""};
  const char *path = getenv("HALOCONV_CONV_PATH");
  if (path != NULL && !hc_fast_set_path(path)) {
    return PyErr_Format(PyExc_ImportError, "HALOCONV_CONV_PATH is '%s', expected 'auto', 'general' or 'fast'",
                        path);
  }
  if (hc_device_load(&status) != HC_OK) {
    PyErr_SetString(PyExc_ImportError, status.message);
    return NULL;
  }
  const char *depthwise_mode = getenv("HALOCONV_DEPTHWISE");
  if (depthwise_mode != NULL && !hc_depthwise_set_mode(depthwise_mode)) {
    return PyErr_Format(PyExc_ImportError, "HALOCONV_DEPTHWISE is '%s', expected 'auto', 'off' or 'on'",
                        depthwise_mode);
  }
  if (hc_kernels_register(&status) != HC_OK) {
    PyErr_Format(PyExc_ImportError, "haloconv could not register its operators with this torch: %s",
                 status.message);
    return NULL;
  }
  PyObject *module = PyModule_Create(&definition);
  if (module != NULL && PyModule_AddFunctions(module, hc_transport_methods) != 0) {
    Py_CLEAR(module);
  }
  return module;
}
