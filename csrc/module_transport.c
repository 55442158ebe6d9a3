/* module_transport: see module_transport.h. What may take long runs without the GIL. */
#include "module_transport.h"

#include <string.h>

#include "transport_nccl.h"

static PyObject *raise(const hc_status *status) {
  PyErr_SetString(PyExc_RuntimeError, status->message);
  return NULL;
}

static PyObject *nccl_version(PyObject *self, PyObject *args) {
  const hc_nccl_api *api = NULL;
  hc_status status = {HC_OK, ""};
  int version = 0;
  (void)self, (void)args;
  HC_TRY(hc_nccl_api_get(&api, &status));
  HC_TRY_NCCL(api, &status, NULL, ncclGetVersion(&version));
  return PyLong_FromLong(version);
done:
  return raise(&status);
}

static PyObject *fake_device(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  return PyBool_FromLong(hc_nccl_api_is_fake());
}

static PyObject *nccl_new_id(PyObject *self, PyObject *args) {
  hc_status status = {HC_OK, ""};
  ncclUniqueId id;
  (void)self, (void)args;
  memset(&id, 0, sizeof id);
  if (hc_comm_new_id(&id, &status) != HC_OK) {
    return raise(&status);
  }
  return PyBytes_FromStringAndSize(id.internal, sizeof id.internal);
}

static PyObject *nccl_connect(PyObject *self, PyObject *args) {
  const char *group, *bytes;
  Py_ssize_t length;
  int device;
  long long generation, rank, world;
  double timeout_s;
  hc_status status = {HC_OK, ""};
  ncclUniqueId id;
  (void)self;
  if (!PyArg_ParseTuple(args, "sLiLLy#d", &group, &generation, &device, &rank, &world, &bytes, &length,
                        &timeout_s)) {
    return NULL;
  }
  if (length != (Py_ssize_t)sizeof id.internal) {
    return PyErr_Format(PyExc_ValueError, "id has %zd bytes, expected %zu", length, sizeof id.internal);
  }
  memcpy(id.internal, bytes, sizeof id.internal);
  PyThreadState *state = PyEval_SaveThread();
  (void)hc_comm_connect(group, generation, device, rank, world, &id, timeout_s, &status);
  PyEval_RestoreThread(state);
  if (status.code != HC_OK) {
    return raise(&status);
  }
  Py_RETURN_NONE;
}

static PyObject *nccl_is_connected(PyObject *self, PyObject *args) {
  const char *group;
  int device;
  (void)self;
  if (!PyArg_ParseTuple(args, "si", &group, &device)) {
    return NULL;
  }
  return PyBool_FromLong(hc_comm_find(group, device) != NULL);
}

static PyObject *nccl_warn(PyObject *self, PyObject *args) {
  const char *group, *reason;
  long long generation, last_good;
  (void)self;
  if (!PyArg_ParseTuple(args, "sLLs", &group, &generation, &last_good, &reason)) {
    return NULL;
  }
  hc_comm_warn(group, generation, last_good, reason);
  Py_RETURN_NONE;
}

static PyObject *nccl_watch(PyObject *self, PyObject *args) {
  char busy[4096];
  (void)self, (void)args;
  PyThreadState *state = PyEval_SaveThread();
  hc_comm_watch(busy, sizeof busy);
  PyEval_RestoreThread(state);
  return PyUnicode_FromString(busy);
}

static PyObject *nccl_close_failed(PyObject *self, PyObject *args) {
  const char *group;
  (void)self;
  if (!PyArg_ParseTuple(args, "s", &group)) {
    return NULL;
  }
  PyThreadState *state = PyEval_SaveThread();
  const int64_t posted = hc_comm_close_failed(group);
  PyEval_RestoreThread(state);
  return PyLong_FromLongLong((long long)posted);
}

static PyObject *nccl_destroy(PyObject *self, PyObject *args) {
  const char *group = NULL;
  (void)self;
  if (!PyArg_ParseTuple(args, "|z", &group)) {
    return NULL;
  }
  PyThreadState *state = PyEval_SaveThread();
  hc_comm_destroy(group);
  PyEval_RestoreThread(state);
  Py_RETURN_NONE;
}

/* context: a list, or NULL after a failure. */
static void append_count(const hc_nccl_count *count, void *context) {
  PyObject **list = context;
  PyObject *item = *list == NULL
                       ? NULL
                       : Py_BuildValue("(sLLLd)", count->op, (long long)count->messages,
                                       (long long)count->bytes, (long long)count->exchanges, count->seconds);
  if (item == NULL || PyList_Append(*list, item) != 0) {
    Py_CLEAR(*list);
  }
  Py_XDECREF(item);
}

static PyObject *nccl_counts(PyObject *self, PyObject *args) {
  PyObject *list = PyList_New(0);
  (void)self, (void)args;
  hc_nccl_visit_counts(append_count, &list);
  return list;
}

static PyObject *nccl_reset_counts(PyObject *self, PyObject *args) {
  (void)self, (void)args;
  hc_nccl_reset_counts();
  Py_RETURN_NONE;
}

#ifdef HC_FAULTS
/* Posts a message of `bytes` to the next rank and a receive from the one before, forgets its own references, and waits.
 * Returns the bytes received, of which there is a reference left only in the transport until then. */
static PyObject *fault_forgetful_exchange(PyObject *self, PyObject *args) {
  const char *group;
  long long rank, world, bytes;
  hc_status status = {HC_OK, ""};
  hc_messages sends = {0, NULL}, recvs = {0, NULL};
  hc_request request = {0, NULL};
  AtenTensorHandle received = NULL;
  PyObject *result = NULL;
  void *data = NULL;
  (void)self;
  if (!PyArg_ParseTuple(args, "sLLL", &group, &rank, &world, &bytes)) {
    return NULL;
  }
  hc_shape like = {.ndim = 1,
                   .sizes = {bytes},
                   .strides = {1},
                   .dtype = aoti_torch_dtype_uint8(),
                   .device_type = aoti_torch_device_type_cpu()};
  PyThreadState *state = PyEval_SaveThread();
  HC_TRY(hc_messages_init(&sends, 1, &status));
  HC_TRY(hc_messages_init(&recvs, 1, &status));
  HC_TRY(hc_transport_buffer(bytes, false, &like, &sends.items[0].buffer, &status));
  sends.items[0].peer = (rank + 1) % world;
  sends.count = 1;
  HC_TRY(hc_transport_buffer(bytes, true, &like, &recvs.items[0].buffer, &status));
  recvs.items[0].peer = (rank + world - 1) % world;
  recvs.count = 1;
  HC_TRY_TORCH(&status, aoti_torch_get_data_ptr(sends.items[0].buffer, &data));
  memset(data, (int)rank + 1, (size_t)bytes);
  HC_TRY(hc_tensor_share(recvs.items[0].buffer, &received, &status));
  HC_TRY(hc_transport_post(group, &like, &sends, &recvs, "forgetful", 0, &request, &status));
  hc_messages_free(&sends);
  HC_TRY(hc_transport_wait(&request, &status));
  HC_TRY_TORCH(&status, aoti_torch_get_data_ptr(received, &data));
done:
  (void)hc_transport_wait(&request, &status);
  PyEval_RestoreThread(state);
  result = status.code == HC_OK ? PyBytes_FromStringAndSize(data, (Py_ssize_t)bytes) : raise(&status);
  hc_messages_free(&sends);
  hc_messages_free(&recvs);
  hc_tensor_free(&received);
  return result;
}
#endif

PyMethodDef hc_transport_methods[] = {
#ifdef HC_FAULTS
    {"fault_forgetful_exchange", fault_forgetful_exchange, METH_VARARGS,
     "fault_forgetful_exchange(group, rank, world, bytes) -> bytes. A ring; the buffer that is sent is freed "
     "between post and wait"},
#endif
    {"nccl_version", nccl_version, METH_NOARGS,
     "nccl_version() -> int. Of the NCCL that torch has loaded; RuntimeError says why it cannot be used"},
    {"fake_device", fake_device, METH_NOARGS,
     "fake_device() -> bool. For tests: whether CPU tensors count as device memory (HALOCONV_FAKE_CUDA)"},
    {"nccl_new_id", nccl_new_id, METH_NOARGS, "nccl_new_id() -> bytes, for nccl_connect on all ranks"},
    {"nccl_connect", nccl_connect, METH_VARARGS,
     "nccl_connect(group, generation, device, rank, world, id, timeout_s). Collective: makes the "
     "communicator"},
    {"nccl_is_connected", nccl_is_connected, METH_VARARGS, "nccl_is_connected(group, device) -> bool"},
    {"nccl_warn", nccl_warn, METH_VARARGS,
     "nccl_warn(group, generation, last_good, reason): exchanges after that number fail with the reason"},
    {"nccl_watch", nccl_watch, METH_NOARGS,
     "nccl_watch() -> the names of the groups with something in flight, joined with commas"},
    {"nccl_close_failed", nccl_close_failed, METH_VARARGS,
     "nccl_close_failed(group) -> how many exchanges it had posted. Aborts it; the ranks connect anew"},
    {"nccl_destroy", nccl_destroy, METH_VARARGS,
     "nccl_destroy(group=None): ends the communicators of a group, or all, newest first"},
    {"nccl_counts", nccl_counts, METH_NOARGS,
     "nccl_counts() -> [(op, messages, bytes, exchanges, seconds), ...] since the last reset"},
    {"nccl_reset_counts", nccl_reset_counts, METH_NOARGS, "nccl_reset_counts()"},
    {NULL, NULL, 0, NULL},
};
