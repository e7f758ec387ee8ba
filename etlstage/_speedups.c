/*
 * Boundaries in bulk, compiled: what framing.py and columnar.py do with what is sound.
 *
 * Nothing here knows what to say about the rest. A function returns None then, and its
 * twin in Python, which is always there, takes the closer look; what is returned is
 * what the twin would return, and the same properties test both.
 *
 * Markers are any byte strings of which, in one direction, none is a part of another or
 * ends as another begins: markers.py has seen to that. Only the stable ABI is used: one
 * build serves every Python from 3.11 on.
 */

#define _GNU_SOURCE /* memmem */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef struct { const char *at; Py_ssize_t size; } Bytes;

typedef struct { void *items; Py_ssize_t count, room; } Array;

/* Return the place of one item more, or NULL with an exception. */
static void *add(Array *array, size_t width)
{
    if (array->count == array->room) {
        array->room = array->room * 2 + 16;
        void *items = PyMem_Realloc(array->items, (size_t)array->room * width);
        if (!items)
            return PyErr_NoMemory();
        array->items = items;
    }
    return (char *)array->items + (size_t)array->count++ * width;
}

static int add_message(Array *messages, const char *at, Py_ssize_t size)
{
    Bytes *message = add(messages, sizeof(Bytes));
    if (message)
        *message = (Bytes){at, size};
    return message ? 0 : -1;
}

static int equal(Bytes one, Bytes other)
{
    return one.size == other.size && !memcmp(one.at, other.at, (size_t)one.size);
}

/* Find what, whole, in [at, end), or return NULL. */
static const char *find(const char *at, const char *end, Bytes what)
{
    if (what.size == 1)
        return memchr(at, *what.at, (size_t)(end - at));
    return memmem(at, (size_t)(end - at), what.at, (size_t)what.size);
}

/* Return how many bytes the messages of a list have, or None if one of them is none. */
static PyObject *measure(PyObject *module, PyObject *list)
{
    Py_ssize_t total = 0, count = PyList_Size(list);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = PyList_GetItem(list, i);
        if (!PyBytes_CheckExact(one) || PyBytes_Size(one) > PY_SSIZE_T_MAX - total)
            Py_RETURN_NONE;
        total += PyBytes_Size(one);
    }
    return count < 0 ? NULL : PyLong_FromSsize_t(total);
}

/* Return where each message begins, and the last ends, if they are put one behind the
 * other: int32 as Arrow has them. None if one of them is not bytes, or they are too large. */
static PyObject *bounds(PyObject *module, PyObject *list)
{
    Py_ssize_t total = 0, count = PyList_Size(list);
    if (count < 0)
        return NULL;
    PyObject *made = PyBytes_FromStringAndSize(NULL, (count + 1) * (Py_ssize_t)sizeof(int32_t));
    char *to = made ? PyBytes_AsString(made) : NULL;
    for (Py_ssize_t i = 0; made && i <= count; i++, to += sizeof(int32_t)) {
        int32_t at = (int32_t)total;
        memcpy(to, &at, sizeof at);
        if (i == count)
            break;
        PyObject *one = PyList_GetItem(list, i);
        if (!PyBytes_CheckExact(one) || PyBytes_Size(one) > INT32_MAX - total)
            return Py_DECREF(made), Py_NewRef(Py_None);
        total += PyBytes_Size(one);
    }
    return made;
}

/* --- join: messages, an EOM behind each -------------------------------------------- */

typedef struct {
    Bytes markers[5]; /* EOM, and what else must not be in what is sent, or NULL */
    int largest;      /* byte of the markers, if each is one byte long; or 255 */
} Rules;

/* Read the tuple that Markers is; return 0 with an exception if it is not like that. */
static int read_rules(PyObject *markers, Rules *rules)
{
    Bytes *m = rules->markers;
    if (!PyArg_ParseTuple(markers, "y#y#y#y#z#", &m[0].at, &m[0].size, &m[1].at, &m[1].size,
                          &m[2].at, &m[2].size, &m[3].at, &m[3].size, &m[4].at, &m[4].size))
        return 0;
    if (equal(m[0], m[1]))
        m[1].at = NULL; /* an EOM behind each message is an EOP, too */
    rules->largest = 0;
    for (int i = 0; i < 5; i++) {
        int byte = !m[i].at ? 0 : m[i].size == 1 ? (unsigned char)*m[i].at : 255;
        rules->largest = byte > rules->largest ? byte : rules->largest;
    }
    return 1;
}

/* Whether a message, with its EOM behind it, may be sent. */
static int may_be_sent(const char *at, Py_ssize_t size, const Rules *rules)
{
    /* Nearly all messages are text, and nearly all markers control characters. */
    unsigned char least = 255;
    for (Py_ssize_t i = 0; i < size; i++)
        least = (unsigned char)at[i] < least ? (unsigned char)at[i] : least;
    if (least > rules->largest)
        return 1;
    const char *over = at + size, *end = over + rules->markers[0].size;
    int sound = find(at, end, rules->markers[0]) == over;
    for (int i = 1; sound && i < 5; i++)
        sound = !rules->markers[i].at || !find(at, end, rules->markers[i]);
    return sound;
}

static PyObject *join(const Array *run, const Rules *rules, Py_ssize_t limit)
{
    const Bytes *messages = run->items, eom = rules->markers[0];
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < run->count; i++) {
        if (messages[i].size > limit)
            Py_RETURN_NONE;
        if (eom.size > PY_SSIZE_T_MAX - total - messages[i].size)
            return PyErr_NoMemory();
        total += messages[i].size + eom.size;
    }
    PyObject *wire = PyBytes_FromStringAndSize(NULL, total);
    char *to = wire ? PyBytes_AsString(wire) : NULL;
    for (Py_ssize_t i = 0; wire && i < run->count; i++) {
        Py_ssize_t size = messages[i].size;
        memcpy(to, messages[i].at, (size_t)size);
        memcpy(to + size, eom.at, (size_t)eom.size);
        if (!may_be_sent(to, size, rules))
            return Py_DECREF(wire), Py_NewRef(Py_None);
        to += size + eom.size;
    }
    return wire;
}

static PyObject *join_list(PyObject *module, PyObject *args)
{
    PyObject *list, *markers, *wire = NULL;
    Py_ssize_t limit;
    Rules rules;
    Array run = {0};
    if (!PyArg_ParseTuple(args, "O!O!n", &PyList_Type, &list, &PyTuple_Type, &markers, &limit) ||
        !read_rules(markers, &rules))
        return NULL;
    for (Py_ssize_t i = 0; !wire && i < PyList_Size(list); i++) {
        PyObject *one = PyList_GetItem(list, i);
        if (!PyBytes_Check(one))
            wire = Py_NewRef(Py_None);
        else if (add_message(&run, PyBytes_AsString(one), PyBytes_Size(one)) < 0)
            return PyMem_Free(run.items), NULL;
    }
    wire = wire ? wire : join(&run, &rules, limit);
    PyMem_Free(run.items);
    return wire;
}

static PyObject *join_column(PyObject *module, PyObject *args)
{
    PyObject *markers, *wire = NULL;
    Py_buffer ends, data;
    Py_ssize_t first, count, limit;
    Rules rules;
    Array run = {0};
    if (!PyArg_ParseTuple(args, "y*y*nnO!n", &ends, &data, &first, &count,
                          &PyTuple_Type, &markers, &limit))
        return NULL;
    Py_ssize_t held = ends.len / (Py_ssize_t)sizeof(int32_t) - 1;
    int inside = first >= 0 && count >= 0 && first <= held && count <= held - first;
    if (!read_rules(markers, &rules))
        goto done;
    for (Py_ssize_t i = first; inside && i < first + count; i++) {
        int32_t at[2]; /* copied: the buffer may begin anywhere */
        memcpy(at, (const char *)ends.buf + (size_t)i * sizeof(*at), sizeof(at));
        inside = 0 <= at[0] && at[0] <= at[1] && at[1] <= data.len;
        if (inside && add_message(&run, (const char *)data.buf + at[0], at[1] - at[0]) < 0)
            goto done;
    }
    if (inside)
        wire = join(&run, &rules, limit);
    else
        PyErr_SetString(PyExc_ValueError, "an element lies outside of its column");
done:
    PyMem_Free(run.items);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&data);
    return wire;
}

/* --- split: replies, an EOP behind each --------------------------------------------- */

typedef struct {
    Array messages;  /* of Bytes */
    Array ends;      /* of int32_t: of each reply, how many messages end before it does */
    Py_ssize_t end;  /* of the last reply */
    int one_to_one;
} Replies;

/* Return whether all replies are sound, or -1 with an exception. */
static int find_replies(Bytes data, Bytes eom, Bytes eop, Replies *replies)
{
    const char *at = data.at, *end = at + data.size, *stop;
    int same = equal(eom, eop);
    while ((stop = find(at, end, eop))) {
        Py_ssize_t before = replies->messages.count;
        /* Where they are the same, an EOP ends the message, too. */
        while (same ? replies->messages.count == before : at < stop) {
            const char *over = same ? stop : find(at, stop, eom);
            if (!over)
                return 0;
            if (add_message(&replies->messages, at, over - at) < 0)
                return -1;
            at = over + eom.size;
        }
        int32_t *ended = add(&replies->ends, sizeof(int32_t));
        if (!ended)
            return -1;
        *ended = (int32_t)replies->messages.count;
        replies->one_to_one &= replies->messages.count == before + 1;
        at = stop + eop.size;
        replies->end = at - data.at;
    }
    return 1;
}

static PyObject *as_lists(const Replies *replies)
{
    const Bytes *found = replies->messages.items;
    const int32_t *ends = replies->ends.items;
    Py_ssize_t several = replies->one_to_one ? 0 : replies->ends.count;
    PyObject *messages = PyList_New(replies->messages.count);
    PyObject *groups = several ? PyList_New(several) : Py_NewRef(Py_None);
    for (Py_ssize_t i = 0; messages && i < replies->messages.count; i++) {
        PyObject *one = PyBytes_FromStringAndSize(found[i].at, found[i].size);
        if (!one || PyList_SetItem(messages, i, one) < 0)
            Py_CLEAR(messages);
    }
    for (Py_ssize_t i = 0; messages && groups && i < several; i++) {
        PyObject *part = PyList_GetSlice(messages, i ? ends[i - 1] : 0, ends[i]);
        PyObject *group = part ? PyList_AsTuple(part) : NULL;
        Py_XDECREF(part);
        if (!group || PyList_SetItem(groups, i, group) < 0)
            Py_CLEAR(groups);
    }
    if (messages && groups)
        return Py_BuildValue("NONn", messages, Py_None, groups, replies->end);
    return Py_XDECREF(messages), Py_XDECREF(groups), NULL;
}

static PyObject *as_columns(const Replies *replies)
{
    const Bytes *found = replies->messages.items;
    Py_ssize_t count = replies->messages.count, total = 0, width = sizeof(int32_t);
    for (Py_ssize_t i = 0; i < count; i++)
        total += found[i].size;
    PyObject *values = PyBytes_FromStringAndSize(NULL, total);
    PyObject *ends = PyBytes_FromStringAndSize(NULL, (count + 1) * width);
    if (!values || !ends)
        return Py_XDECREF(values), Py_XDECREF(ends), NULL;
    char *to = PyBytes_AsString(values), *ended = PyBytes_AsString(ends);
    int32_t so_far = 0;
    for (Py_ssize_t i = 0; i < count; so_far += (int32_t)found[i++].size) {
        memcpy(ended + i * width, &so_far, (size_t)width);
        memcpy(to + so_far, found[i].at, (size_t)found[i].size);
    }
    memcpy(ended + count * width, &so_far, (size_t)width);
    /* What is NULL becomes None. */
    return Py_BuildValue("NNy#n", values, ends, replies->one_to_one ? NULL : replies->ends.items,
                         replies->ends.count * width, replies->end);
}

static PyObject *split(PyObject *module, PyObject *args)
{
    Bytes data, eom, eop;
    int columns;
    Replies replies = {.one_to_one = 1};
    if (!PyArg_ParseTuple(args, "y#y#y#p", &data.at, &data.size, &eom.at, &eom.size, &eop.at,
                          &eop.size, &columns))
        return NULL;
    if (!eom.size || !eop.size || data.size > INT32_MAX)
        Py_RETURN_NONE;
    int sound = find_replies(data, eom, eop, &replies);
    PyObject *result = sound < 0 ? NULL : !sound ? Py_NewRef(Py_None)
                       : columns ? as_columns(&replies) : as_lists(&replies);
    PyMem_Free(replies.messages.items);
    PyMem_Free(replies.ends.items);
    return result;
}

static PyMethodDef methods[] = {
    {"measure", measure, METH_O, NULL},
    {"bounds", bounds, METH_O, NULL},
    {"join_list", join_list, METH_VARARGS, NULL},
    {"join_column", join_column, METH_VARARGS, NULL},
    {"split", split, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_speedups", .m_methods = methods};

PyMODINIT_FUNC PyInit__speedups(void) { return PyModuleDef_Init(&definition); }
