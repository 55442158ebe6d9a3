/* module_transport: the functions of haloconv._C with which Python makes, watches and ends NCCL communicators. */
#ifndef HC_MODULE_TRANSPORT_H
#define HC_MODULE_TRANSPORT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef hc_transport_methods[];

#endif
