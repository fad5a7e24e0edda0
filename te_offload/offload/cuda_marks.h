/* Events of one GPU that nobody holds, and marks: moments in its work.

In: addresses of the CUDA runtime's functions. Out: `Mark` objects. Keeps true: Python's lock is not held while the runtime
is called, which may block; an event is recorded anew only when nobody holds its mark; the events live as long as a queue or
a mark does. Does not: record an event (cuda_queue.c does), or raise errors of its own for what the runtime refused: a
function that is passed in does.

Part of cuda_queue.c, which cuda_queue.py builds with it. Signatures: NVIDIA's CUDA Runtime API. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

typedef struct CUevent_st *Event;
typedef struct CUstream_st *Stream;
typedef struct { /* cudaMemcpyAttributes */
    int source_access_order, source_type, source_id, target_type, target_id;
    unsigned flags;
} Attributes;

enum { ORDERED_BY_STREAM = 1, DEFAULT_KIND = 4, NO_TIMING = 2, NOT_READY = 600 };

typedef struct {
    int (*event_create)(Event *, unsigned);
    int (*event_destroy)(Event);
    int (*event_record)(Event, Stream);
    int (*event_query)(Event);
    int (*event_synchronize)(Event);
    int (*event_elapsed)(float *, Event, Event);
    int (*stream_wait)(Stream, Event, unsigned);
    int (*copy)(void *, const void *, size_t, int, Stream);
    int (*copy_batch)(void **, void **, size_t *, size_t, Attributes *, size_t *, size_t, Stream); /* or NULL */
    int (*get_device)(int *);
    int (*set_device)(int);
    int (*last_error)(void);
} Runtime;
enum { FUNCTIONS = sizeof(Runtime) / sizeof(void (*)(void)) };

/* Events that nobody holds. */
typedef struct {
    Runtime runtime;
    PyObject *refuse; /* (error, copies, bytes): raises */
    Py_ssize_t holders;
    int device;
    struct {
        Event *events;
        size_t count, room;
    } spare[2]; /* without times, and with */
} Stock;

static void stock_release(Stock *stock) {
    if (--stock->holders)
        return;
    for (int timed = 0; timed < 2; timed++) {
        for (size_t i = 0; i < stock->spare[timed].count; i++)
            stock->runtime.event_destroy(stock->spare[timed].events[i]); /* no one can be told of an error */
        PyMem_Free(stock->spare[timed].events);
    }
    Py_XDECREF(stock->refuse);
    PyMem_Free(stock);
}

/* Raise what the runtime has refused. Always NULL. */
static PyObject *refused(Stock *stock, int error, size_t copies, size_t nbytes) {
    PyObject *result = PyObject_CallFunction(stock->refuse, "inn", error, (Py_ssize_t)copies, (Py_ssize_t)nbytes);
    if (result) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "an error of the CUDA runtime was not raised");
    }
    return NULL;
}

/* Make the stock's GPU the current one: events are made for that, and the default stream's handle means that one's.
`before`: what `leave` makes current again. */
static int enter(const Stock *stock, int *before) {
    *before = stock->device;
    int error = stock->runtime.get_device(before);
    return !error && *before != stock->device ? stock->runtime.set_device(stock->device) : error;
}

static void leave(const Stock *stock, int before) {
    if (before != stock->device)
        stock->runtime.set_device(before);
}

typedef struct {
    PyObject_HEAD
    Stock *stock;
    Event event;
    int timed;
} Mark;

static void mark_free(PyObject *object) {
    Mark *mark = (Mark *)object;
    Stock *stock = mark->stock;
    PyTypeObject *type = Py_TYPE(object);
    if (mark->event) {
        int timed = mark->timed;
        if (stock->spare[timed].count == stock->spare[timed].room) {
            size_t room = stock->spare[timed].room ? 2 * stock->spare[timed].room : 64;
            Event *events = PyMem_Realloc(stock->spare[timed].events, room * sizeof(Event));
            if (events) {
                stock->spare[timed].events = events;
                stock->spare[timed].room = room;
            }
        }
        if (stock->spare[timed].count < stock->spare[timed].room)
            stock->spare[timed].events[stock->spare[timed].count++] = mark->event;
        else
            stock->runtime.event_destroy(mark->event);
    }
    stock_release(stock);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *mark_is_over(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Mark *mark = (Mark *)object;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = mark->stock->runtime.event_query(mark->event);
    if (error == NOT_READY)
        mark->stock->runtime.last_error(); /* else torch would raise it after its next kernel */
    Py_END_ALLOW_THREADS
    if (error && error != NOT_READY)
        return refused(mark->stock, error, 0, 0);
    return PyBool_FromLong(!error);
}

static PyObject *mark_wait(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Mark *mark = (Mark *)object;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = mark->stock->runtime.event_synchronize(mark->event);
    Py_END_ALLOW_THREADS
    if (error)
        return refused(mark->stock, error, 0, 0);
    Py_RETURN_NONE;
}

static PyObject *mark_milliseconds_to(PyObject *object, PyObject *other) {
    Mark *mark = (Mark *)object;
    float milliseconds = 0;
    if (Py_TYPE(other) != Py_TYPE(object)) {
        PyErr_SetString(PyExc_TypeError, "another Mark is needed");
        return NULL;
    }
    int error = mark->stock->runtime.event_elapsed(&milliseconds, mark->event, ((Mark *)other)->event);
    if (error)
        return refused(mark->stock, error, 0, 0);
    return PyFloat_FromDouble(milliseconds);
}

static PyMethodDef mark_methods[] = {
    {"is_over", mark_is_over, METH_NOARGS, "Whether it has passed. Never blocks."},
    {"wait", mark_wait, METH_NOARGS, "Block the host until it has passed."},
    {"milliseconds_to", mark_milliseconds_to, METH_O, "Time from this timed mark to another one; both have passed."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot mark_slots[] = {
    {Py_tp_dealloc, mark_free},
    {Py_tp_methods, mark_methods},
    {Py_tp_doc, "A moment in the work of a GPU."},
    {0, NULL},
};
static PyType_Spec mark_spec = {
    "te_offload_cuda_queue.Mark", sizeof(Mark), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, mark_slots,
};
