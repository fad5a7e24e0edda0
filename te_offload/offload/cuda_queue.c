/* Copies and the events that order them, several calls of the CUDA runtime for one call from Python.

In: addresses of the runtime's functions, streams, pieces (source address, target address, bytes), marks. Out: copies
queued, `Mark` objects (cuda_marks.h). Keeps true: what is done with a mark comes after the work that it was recorded
behind; a copy is queued after all that it must wait for, or not at all; Python's lock is not held while the runtime is
called, which may block where a stream is full; copies out by turns on two streams come one after the other all the same,
and so do those of two threads. Does not: know what is copied, load a library, or raise errors of its own.

Why two streams out: a GPU copies to the host what one stream has queued, all of it, before it looks at another's copies. A
number that the host asks for (`tolist`, `item`) then waits for all that is on its way out. Where the next copy is another
stream's, and waits for the one before, the number goes between the two (docs/results/, offload).

The same calls through torch and ctypes take the host three to five times as long (docs/results/, host time). Built by
cuda_queue.py, which has the Python side of the types here. Signatures: NVIDIA's CUDA Runtime API. */

#include "cuda_marks.h"

enum { FEW = 4 };     /* pieces up to which single copies take the host less time than a batch */
enum { INLINE = 16 }; /* pieces, and marks, for which no memory is asked for */
enum { OUT = 0, BACK = 1 };
enum { TURN = 32 << 20 }; /* bytes out on one stream before it is the other one's turn */

typedef struct {
    PyObject_HEAD
    Stock *stock;
    Stream ways[2];
    Stream beside;           /* the one out whose turn it is not; NULL: there is one stream out */
    Event relay;             /* what it waits for when its turn comes; NULL: it never came */
    size_t since;            /* bytes out since the last turn */
    PyThread_type_lock lock; /* held while a copy is queued: Python's is not */
    PyObject *first[2];      /* the mark that a way waited for first, the last time */
    PyObject *compute;       /* gives the handle of the compute stream, asked with the number of the GPU */
    PyObject *device;
    PyObject *copy_type;
    PyTypeObject *mark_type;
} Queue;

static void queue_free(PyObject *object) {
    Queue *queue = (Queue *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (int way = 0; way < 2; way++)
        Py_XDECREF(queue->first[way]);
    Py_XDECREF(queue->compute);
    Py_XDECREF(queue->device);
    Py_XDECREF(queue->copy_type);
    Py_XDECREF(queue->mark_type);
    if (queue->relay)
        queue->stock->runtime.event_destroy(queue->relay); /* no one can be told of an error */
    if (queue->lock)
        PyThread_free_lock(queue->lock);
    if (queue->stock)
        stock_release(queue->stock);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *functions, *compute, *refuse, *copy_type;
    unsigned long long out, back, beside;
    int device;
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Queue takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!i(KKK)OOO!", &PyTuple_Type, &functions, &device, &out, &back, &beside, &compute,
                          &refuse, &PyType_Type, &copy_type))
        return NULL;
    if (PyTuple_Size(functions) != FUNCTIONS || !PyType_IsSubtype((PyTypeObject *)copy_type, &PyTuple_Type)) {
        PyErr_Format(PyExc_TypeError, "%d functions and a kind of tuple are needed", (int)FUNCTIONS);
        return NULL;
    }
    void *addresses[FUNCTIONS];
    for (int i = 0; i < FUNCTIONS; i++) {
        addresses[i] = PyLong_AsVoidPtr(PyTuple_GetItem(functions, i));
        if (!addresses[i] && PyErr_Occurred())
            return NULL;
    }
    Queue *queue = PyObject_New(Queue, type);
    if (!queue)
        return NULL;
    memset((char *)queue + sizeof(PyObject), 0, sizeof(Queue) - sizeof(PyObject));
    queue->stock = PyMem_Calloc(1, sizeof(Stock));
    queue->device = PyLong_FromLong(device);
    queue->lock = PyThread_allocate_lock();
    if (!queue->stock || !queue->device || !queue->lock) {
        Py_DECREF(queue);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    memcpy(&queue->stock->runtime, addresses, sizeof(addresses));
    queue->stock->holders = 1;
    queue->stock->device = device;
    queue->stock->refuse = Py_NewRef(refuse);
    queue->ways[OUT] = (Stream)(uintptr_t)out;
    queue->ways[BACK] = (Stream)(uintptr_t)back;
    queue->beside = (Stream)(uintptr_t)beside;
    queue->compute = Py_NewRef(compute);
    queue->copy_type = Py_NewRef(copy_type);
    queue->mark_type = (PyTypeObject *)Py_NewRef(*(PyObject **)PyType_GetModuleState(type));
    return (PyObject *)queue;
}

/* A mark whose event was not recorded yet. */
static Mark *new_mark(Queue *queue, int timed) {
    Stock *stock = queue->stock;
    Mark *mark = PyObject_New(Mark, queue->mark_type);
    if (!mark)
        return NULL;
    mark->stock = stock;
    mark->event = NULL;
    mark->timed = timed;
    stock->holders++;
    if (stock->spare[timed].count) {
        mark->event = stock->spare[timed].events[--stock->spare[timed].count];
        return mark;
    }
    int before, error = enter(stock, &before);
    if (!error)
        error = stock->runtime.event_create(&mark->event, timed ? 0 : NO_TIMING);
    leave(stock, before);
    if (error) {
        mark->event = NULL;
        refused(stock, error, 0, 0);
        Py_CLEAR(mark);
    }
    return mark;
}

/* The event of a mark, also of one that torch's events were recorded for; NULL with an exception. */
static Event event_of(Queue *queue, PyObject *mark) {
    if (Py_TYPE(mark) == queue->mark_type)
        return ((Mark *)mark)->event;
    PyObject *event = PyObject_GetAttrString(mark, "event");
    PyObject *handle = event ? PyObject_GetAttrString(event, "cuda_event") : NULL;
    Event found = handle ? PyLong_AsVoidPtr(handle) : NULL;
    if (!found && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a mark's event was never recorded");
    Py_XDECREF(event);
    Py_XDECREF(handle);
    return found;
}

/* Whether the compute stream's handle could be found. */
static int compute_stream(Queue *queue, Stream *stream) {
    PyObject *handle = PyObject_CallOneArg(queue->compute, queue->device);
    if (!handle)
        return 0;
    *stream = PyLong_AsVoidPtr(handle); /* NULL is the default stream's */
    Py_DECREF(handle);
    return !PyErr_Occurred();
}

static PyObject *queue_mark(PyObject *object, PyObject *timed) {
    Queue *queue = (Queue *)object;
    Stream stream;
    int before, error;
    Mark *mark = compute_stream(queue, &stream) ? new_mark(queue, timed == Py_True) : NULL;
    if (!mark)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = enter(queue->stock, &before);
    if (!error)
        error = queue->stock->runtime.event_record(mark->event, stream);
    leave(queue->stock, before);
    Py_END_ALLOW_THREADS
    if (error) {
        refused(queue->stock, error, 0, 0);
        Py_CLEAR(mark);
    }
    return (PyObject *)mark;
}

static PyObject *queue_block_compute(PyObject *object, PyObject *mark) {
    Queue *queue = (Queue *)object;
    Stream stream;
    int before, error;
    Event event = event_of(queue, mark);
    if (!event || !compute_stream(queue, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    error = enter(queue->stock, &before);
    if (!error)
        error = queue->stock->runtime.stream_wait(stream, event, 0);
    leave(queue->stock, before);
    Py_END_ALLOW_THREADS
    if (error)
        return refused(queue->stock, error, 0, 0);
    Py_RETURN_NONE;
}

static PyObject *queue_forget(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    for (int way = 0; way < 2; way++)
        Py_CLEAR(((Queue *)object)->first[way]);
    Py_RETURN_NONE;
}

/* The other stream's turn: what is out next comes after all that is out so far. */
static int turn(Queue *queue) {
    const Runtime *runtime = &queue->stock->runtime;
    Stream before = queue->ways[OUT];
    int error = queue->relay ? 0 : runtime->event_create(&queue->relay, NO_TIMING);
    if (!error)
        error = runtime->event_record(queue->relay, before);
    if (!error)
        error = runtime->stream_wait(queue->beside, queue->relay, 0);
    if (!error) {
        queue->ways[OUT] = queue->beside;
        queue->beside = before;
        queue->since = 0;
    }
    return error;
}

/* Copies of some pieces in order, out by turns. */
static int copy_all(Queue *queue, long way, void **sources, void **targets, size_t *lengths, size_t count) {
    const Runtime *runtime = &queue->stock->runtime;
    int turns = way == OUT && queue->beside, error = 0;
    size_t i = 0, at = 0; /* the next piece, and bytes of it that are done */
    while (i < count && !error) {
        if (turns && queue->since >= TURN)
            error = turn(queue);
        size_t left = lengths[i] - at, from = i;
        Stream stream = queue->ways[way];
        if (error)
            break;
        if (turns && (at || left > TURN)) { /* a part of a long one, or its rest; no rest is much shorter than a turn */
            size_t part = left < TURN + TURN / 4 ? left : TURN;
            error = runtime->copy((char *)targets[i] + at, (char *)sources[i] + at, part, DEFAULT_KIND, stream);
            queue->since += part;
            at = part == left ? 0 : at + part;
            i += !at;
            continue;
        }
        size_t nbytes = 0;
        do
            nbytes += lengths[i++];
        while (i < count && (!turns || (queue->since + nbytes < TURN && lengths[i] <= TURN)));
        queue->since += turns ? nbytes : 0;
        if (i - from <= FEW || !runtime->copy_batch) {
            for (; from < i && !error; from++)
                error = runtime->copy(targets[from], sources[from], lengths[from], DEFAULT_KIND, stream);
        } else {
            Attributes attributes = {ORDERED_BY_STREAM, 0, 0, 0, 0, 0};
            size_t first = 0;
            error = runtime->copy_batch(targets + from, sources + from, lengths + from, i - from, &attributes, &first, 1,
                                        stream);
        }
    }
    return error;
}

/* All that one copy asks of the runtime, in order; nothing of Python. */
static int start(Queue *queue, long way, Event *waits, size_t waits_count, Event began, Event ended, void **sources,
                 void **targets, size_t *lengths, size_t count) {
    const Stock *stock = queue->stock;
    const Runtime *runtime = &stock->runtime;
    PyThread_acquire_lock(queue->lock, WAIT_LOCK);
    int before, error = enter(stock, &before);
    if (!error && way == OUT && queue->beside && queue->since >= TURN)
        error = turn(queue);
    for (size_t i = 0; i < waits_count && !error; i++)
        error = runtime->stream_wait(queue->ways[way], waits[i], 0);
    if (!error && began)
        error = runtime->event_record(began, queue->ways[way]);
    if (!error)
        error = copy_all(queue, way, sources, targets, lengths, count);
    if (!error)
        error = runtime->event_record(ended, queue->ways[way]);
    leave(stock, before);
    PyThread_release_lock(queue->lock);
    return error;
}

/* Addresses and lengths of pieces, tuples of three numbers; the sum of the lengths in `nbytes`. */
static int read_pieces(PyObject **pieces, size_t count, void **sources, void **targets, size_t *lengths,
                       size_t *nbytes) {
    for (size_t i = 0; i < count; i++) {
        PyObject *piece = pieces[i];
        if (!PyTuple_Check(piece) || PyTuple_GET_SIZE(piece) != 3) {
            PyErr_SetString(PyExc_TypeError, "a piece is a tuple of two addresses and a length");
            return 0;
        }
        sources[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(piece, 0));
        targets[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(piece, 1));
        lengths[i] = PyLong_AsSize_t(PyTuple_GET_ITEM(piece, 2));
        *nbytes += lengths[i];
    }
    return !PyErr_Occurred();
}

static PyObject *new_copy(PyObject *type, PyObject *began, PyObject *ended) {
    PyObject *pair = PyTuple_Pack(2, began, ended), *args = pair ? PyTuple_Pack(1, pair) : NULL;
    PyObject *copy = args ? PyTuple_Type.tp_new((PyTypeObject *)type, args, NULL) : NULL;
    Py_XDECREF(pair);
    Py_XDECREF(args);
    return copy;
}

static PyObject *queue_copy(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    Queue *queue = (Queue *)object;
    if (nargs != 4 || !PyTuple_Check(args[2]) || !PyTuple_GET_SIZE(args[2])) {
        PyErr_SetString(PyExc_TypeError, "copy(way, pieces, after, timed): after a tuple of at least one mark");
        return NULL;
    }
    long way = PyLong_AsLong(args[0]);
    if (way != 0 && way != 1) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a way is 0 (out) or 1 (back)");
        return NULL;
    }
    PyObject *pieces = PySequence_Fast(args[1], "pieces are a list or a tuple");
    if (!pieces)
        return NULL;
    PyObject *first = PyTuple_GET_ITEM(args[2], 0), *result = NULL;
    size_t count = PySequence_Fast_GET_SIZE(pieces), waits_count = 0, nbytes = 0;
    Py_ssize_t marks = PyTuple_GET_SIZE(args[2]);
    Event some_waits[INLINE], *waits = some_waits;
    void *some[3 * INLINE], **memory = some;
    Mark *began = NULL, *ended = NULL;
    if (marks > INLINE)
        waits = PyMem_New(Event, marks);
    if (count > INLINE)
        memory = PyMem_New(void *, 3 * count);
    if (!waits || !memory) {
        PyErr_NoMemory();
        goto end;
    }
    void **sources = memory, **targets = memory + count;
    size_t *lengths = (size_t *)(memory + 2 * count);
    if (!read_pieces(PySequence_Fast_ITEMS(pieces), count, sources, targets, lengths, &nbytes))
        goto end;
    for (Py_ssize_t i = first == queue->first[way]; i < marks; i++) { /* for that one it waits already */
        waits[waits_count] = event_of(queue, PyTuple_GET_ITEM(args[2], i));
        if (!waits[waits_count++])
            goto end;
    }
    if (args[3] == Py_True && !(began = new_mark(queue, 1)))
        goto end;
    if (!(ended = new_mark(queue, args[3] == Py_True)))
        goto end;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = start(queue, way, waits, waits_count, began ? began->event : NULL, ended->event, sources, targets, lengths,
                  count);
    Py_END_ALLOW_THREADS
    if (error) {
        refused(queue->stock, error, count, nbytes);
        goto end;
    }
    Py_INCREF(first); /* only now: another thread's copy may rely on it */
    Py_XSETREF(queue->first[way], first);
    result = new_copy(queue->copy_type, began ? (PyObject *)began : Py_None, (PyObject *)ended);
end:
    Py_DECREF(pieces);
    Py_XDECREF(began);
    Py_XDECREF(ended);
    if (waits != some_waits)
        PyMem_Free(waits);
    if (memory != some)
        PyMem_Free(memory);
    return result;
}

static PyMethodDef queue_methods[] = {
    {"mark", queue_mark, METH_O, "mark(timed): the end of the work queued so far on the compute stream."},
    {"block_compute", queue_block_compute, METH_O, "Make later work of the compute stream wait for a mark."},
    {"copy", (PyCFunction)(void (*)(void))queue_copy, METH_FASTCALL,
     "copy(way, pieces, after, timed): start a copy on a way, 0 or 1, after some marks."},
    {"forget", queue_forget, METH_NOARGS, "Nothing is known any more of what the ways have waited for."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot queue_slots[] = {
    {Py_tp_new, queue_new},
    {Py_tp_dealloc, queue_free},
    {Py_tp_methods, queue_methods},
    {Py_tp_doc, "Queue(functions, device, (out, back, out by turns), compute, refuse, copy_type): copies on one GPU."},
    {0, NULL},
};
static PyType_Spec queue_spec = {"te_offload_cuda_queue.Queue", sizeof(Queue), 0, Py_TPFLAGS_DEFAULT, queue_slots};

static int module_exec(PyObject *module) {
    PyObject *mark = PyType_FromModuleAndSpec(module, &mark_spec, NULL);
    *(PyObject **)PyModule_GetState(module) = mark;
    if (!mark || PyModule_AddObjectRef(module, "Mark", mark) < 0)
        return -1;
    PyObject *queue = PyType_FromModuleAndSpec(module, &queue_spec, NULL);
    int error = queue ? PyModule_AddObjectRef(module, "Queue", queue) : -1;
    Py_XDECREF(queue);
    return error;
}

static void module_free(void *module) {
    PyObject **mark = PyModule_GetState((PyObject *)module);
    if (mark)
        Py_CLEAR(*mark);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};
static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "te_offload_cuda_queue", NULL, sizeof(PyObject *), NULL, module_slots, NULL, NULL, module_free,
};

PyMODINIT_FUNC PyInit_te_offload_cuda_queue(void) { return PyModuleDef_Init(&module_def); }
