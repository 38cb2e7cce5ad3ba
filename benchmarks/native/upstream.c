/*
 * A fake model server: cheap enough never to be the bottleneck, and honest about time.
 *
 *     cc -O2 -o upstream upstream.c && ./upstream PORT [SECONDS]
 *
 * Listens on 127.0.0.1 only and ends by itself after SECONDS (default one hour).
 *
 * The request body says what to answer, in fields that every router passes on, even one that
 * writes the JSON anew. They must stand in the first or the last KEEP bytes.
 *
 *     "stream": true      server-sent events, else one JSON document of about 700 bytes
 *     "max_tokens": N     number of events (also max_completion_tokens; default 20)
 *     "seed": U           microseconds between two events, or before the document (default 0)
 *
 * Every event carries "@<19 digits>@": CLOCK_MONOTONIC nanoseconds at the moment of sending, so
 * that whoever reads it on this machine knows how long it travelled, merged chunks or not. Paced
 * events follow an absolute schedule kept in a heap; a late one does not delay the next.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { KEEP = 8192, MAX_HEAD = 65536, MAX_FDS = 65536, BATCH = 1024 };

typedef int64_t ns_t;

/* What the bytes that come next belong to. */
enum state { HEAD, BODY, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER, ANSWERING };

struct conn {
    int fd;
    enum state state;
    char *in; /* head, then the first and the last KEEP bytes of the body */
    size_t in_len, in_cap, head_len;
    size_t left; /* of the body, or of the chunk */
    char *out;
    size_t out_len, out_sent, out_cap;
    int wants_write;
    int streams;
    long events_left;
    ns_t pace;
    ns_t due;
    int place; /* in the heap; -1 = not there */
};

static int epoll_fd;
static struct conn *conns[MAX_FDS];

static ns_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *grown(void *memory, size_t *capacity, size_t wanted) {
    if (wanted <= *capacity) return memory;
    *capacity = wanted * 2;
    memory = realloc(memory, *capacity);
    if (!memory) abort();
    return memory;
}

/* --- heap of connections that owe something at a certain time -------------------------------- */

static struct conn *heap[MAX_FDS];
static int heap_size;

static void heap_place(int at, struct conn *c) {
    heap[at] = c;
    c->place = at;
}

static void heap_settle(int at) {
    struct conn *c = heap[at];
    while (at > 0 && heap[(at - 1) / 2]->due > c->due) {
        heap_place(at, heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        int child = 2 * at + 1;
        if (child >= heap_size) break;
        if (child + 1 < heap_size && heap[child + 1]->due < heap[child]->due) child++;
        if (heap[child]->due >= c->due) break;
        heap_place(at, heap[child]);
        at = child;
    }
    heap_place(at, c);
}

static void heap_add(struct conn *c, ns_t due) {
    c->due = due;
    heap_place(heap_size++, c);
    heap_settle(heap_size - 1);
}

static void heap_remove(struct conn *c) {
    int at = c->place;
    if (at < 0) return;
    c->place = -1;
    struct conn *last = heap[--heap_size];
    if (last == c) return;
    heap_place(at, last);
    heap_settle(at);
}

/* --- writing --------------------------------------------------------------------------------- */

static void watch(struct conn *c, int write_too) {
    struct epoll_event e = {.events = EPOLLIN | (write_too ? EPOLLOUT : 0), .data.fd = c->fd};
    if (c->wants_write == write_too) return;
    c->wants_write = write_too;
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
}

static void put(struct conn *c, const char *data, size_t size) {
    c->out = grown(c->out, &c->out_cap, c->out_len + size);
    memcpy(c->out + c->out_len, data, size);
    c->out_len += size;
}

/* Return -1 when the connection is lost. */
static int flush(struct conn *c) {
    while (c->out_sent < c->out_len) {
        ssize_t n = send(c->fd, c->out + c->out_sent, c->out_len - c->out_sent, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno != EAGAIN) return -1;
            watch(c, 1);
            return 0;
        }
        c->out_sent += n;
    }
    c->out_sent = c->out_len = 0;
    watch(c, 0);
    return 0;
}

static void put_document(struct conn *c, const char *body) {
    char head[160];
    int n = snprintf(head, sizeof head,
                     "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nServer: fake\r\n"
                     "Content-Length: %zu\r\n\r\n",
                     strlen(body));
    put(c, head, n);
    put(c, body, strlen(body));
}

static void put_event(struct conn *c) {
    char event[400], size[16];
    int n = snprintf(event, sizeof event,
                     "data: {\"id\":\"chatcmpl-9f2c1d7e4b5a\",\"object\":\"chat.completion.chunk\","
                     "\"created\":1700000000,\"model\":\"fake\",\"choices\":[{\"index\":0,"
                     "\"delta\":{\"content\":\"@%019lld@ tok\"},\"finish_reason\":null}]}\n\n",
                     (long long)now_ns());
    put(c, size, snprintf(size, sizeof size, "%x\r\n", n));
    put(c, event, n);
    put(c, "\r\n", 2);
}

static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    "Cache-Control: no-cache\r\nServer: fake\r\nTransfer-Encoding: chunked\r\n\r\n";
static const char STREAM_END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

static const char DOCUMENT[] =
    "{\"id\":\"chatcmpl-9f2c1d7e4b5a\",\"object\":\"chat.completion\",\"created\":1700000000,"
    "\"model\":\"fake\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
    "\"The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. "
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. "
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. "
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps.\"},\"logprobs\":null,"
    "\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":57,\"completion_tokens\":80,"
    "\"total_tokens\":137}}";

/* --- what is asked --------------------------------------------------------------------------- */

static const char *after(struct conn *c, const char *name) {
    const char *found =
        memmem(c->in + c->head_len, c->in_len - c->head_len, name, strlen(name));
    if (!found) return NULL;
    found += strlen(name);
    while (*found == ' ' || *found == ':') found++;
    return found;
}

static long number(struct conn *c, const char *name) {
    const char *value = after(c, name);
    return value ? strtol(value, NULL, 10) : 0;
}

static int next_request(struct conn *c) {
    c->state = HEAD;
    c->in_len = c->head_len = 0;
    return 0;
}

/* Send what is due now; return -1 when the connection is lost. */
static int answer_on(struct conn *c, ns_t due) {
    if (!c->streams) {
        put_document(c, DOCUMENT);
        return flush(c) < 0 ? -1 : next_request(c);
    }
    while (c->events_left > 0) {
        put_event(c);
        c->events_left--;
        if (c->pace > 0 && c->events_left > 0) {
            heap_add(c, due + c->pace);
            return flush(c);
        }
    }
    put(c, STREAM_END, sizeof STREAM_END - 1);
    return flush(c) < 0 ? -1 : next_request(c);
}

/* The request is complete: begin its answer. */
static int answer(struct conn *c) {
    c->state = ANSWERING;
    c->in[c->in_len] = 0;
    int is_get = strncmp(c->in, "GET ", 4) == 0;
    if (is_get || !memmem(c->in, c->head_len, "completions", 11)) {
        /* What routers ask at their start: who are you, are you well? */
        put_document(c, memmem(c->in, c->head_len, "/models", 7)
                            ? "{\"object\":\"list\",\"data\":[{\"id\":\"fake\",\"object\":\"model\","
                              "\"created\":1700000000,\"owned_by\":\"me\"}]}"
                            : "{\"status\":\"ok\",\"model_path\":\"fake\",\"model_id\":\"fake\","
                              "\"served_model_name\":\"fake\",\"is_generation\":true,"
                              "\"tokenizer_path\":\"fake\",\"model_type\":\"llama\","
                              "\"dp_size\":1,\"tp_size\":1}");
        return flush(c) < 0 ? -1 : next_request(c);
    }
    const char *stream = after(c, "\"stream\"");
    long events = number(c, "\"max_tokens\"");
    if (events <= 0) events = number(c, "\"max_completion_tokens\"");
    c->streams = stream && *stream == 't';
    c->events_left = events > 0 ? events : 20;
    c->pace = number(c, "\"seed\"") * 1000LL;
    ns_t now = now_ns();
    if (c->streams) put(c, STREAM_HEAD, sizeof STREAM_HEAD - 1);
    if (!c->streams && c->pace > 0) {
        heap_add(c, now + c->pace);
        return 0;
    }
    return answer_on(c, now);
}

/* --- reading --------------------------------------------------------------------------------- */

static void keep_body(struct conn *c, const char *data, size_t size) {
    size_t room = c->head_len + 2 * KEEP - c->in_len;
    char *tail = c->in + c->head_len + KEEP;
    if (size > room) { /* let go of what is neither near the begin nor near the end */
        if (c->in_len < c->head_len + KEEP) {
            size_t first = c->head_len + KEEP - c->in_len;
            memcpy(c->in + c->in_len, data, first);
            c->in_len += first;
            data += first;
            size -= first;
        }
        if (size > KEEP) {
            data += size - KEEP;
            size = KEEP;
        }
        size_t kept = KEEP - size;
        if (kept > c->in_len - c->head_len - KEEP) kept = c->in_len - c->head_len - KEEP;
        memmove(tail, c->in + c->in_len - kept, kept);
        c->in_len = c->head_len + KEEP + kept;
    }
    memcpy(c->in + c->in_len, data, size);
    c->in_len += size;
}

/* Take more of a head; return how much was used, -1 for one that is too big. */
static ssize_t take_head(struct conn *c, const char *data, size_t size) {
    size_t from = c->in_len > 3 ? c->in_len - 3 : 0, before = c->in_len;
    c->in = grown(c->in, &c->in_cap, c->in_len + size + 2 * KEEP + 1);
    memcpy(c->in + c->in_len, data, size);
    c->in_len += size;
    c->in[c->in_len] = 0;
    char *end = memmem(c->in + from, c->in_len - from, "\r\n\r\n", 4);
    if (!end) return c->in_len > MAX_HEAD ? -1 : (ssize_t)size;
    c->in_len = c->head_len = end - c->in + 4;
    c->in[c->head_len - 1] = 0; /* so that the searches end */
    const char *length = strcasestr(c->in, "\r\ncontent-length:");
    c->left = length ? strtoul(length + 17, NULL, 10) : 0;
    c->state = c->left ? BODY : ANSWERING;
    if (strcasestr(c->in, "\r\ntransfer-encoding: chunked")) {
        c->state = CHUNK_SIZE;
        c->left = 0;
    }
    if (c->state != ANSWERING && strcasestr(c->in, "\r\nexpect: 100"))
        put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    c->in[c->head_len - 1] = '\n';
    return c->head_len - before;
}

/* Take what came; return -1 when the connection is to be closed. */
static int take(struct conn *c, const char *data, size_t size) {
    while (size > 0) {
        size_t used = 1;
        switch (c->state) {
        case HEAD: {
            ssize_t n = take_head(c, data, size);
            if (n < 0 || flush(c) < 0) return -1;
            used = n;
            if (c->state == ANSWERING && answer(c) < 0) return -1;
            break;
        }
        case BODY:
        case CHUNK_DATA:
            used = size < c->left ? size : c->left;
            keep_body(c, data, used);
            c->left -= used;
            if (c->left) break;
            if (c->state == CHUNK_DATA)
                c->state = CHUNK_END;
            else if (answer(c) < 0)
                return -1;
            break;
        case CHUNK_SIZE:
            if (*data == '\n')
                c->state = c->left ? CHUNK_DATA : TRAILER;
            else if (*data >= '0' && *data <= '9')
                c->left = c->left * 16 + *data - '0';
            else if ((*data | 32) >= 'a' && (*data | 32) <= 'f')
                c->left = c->left * 16 + (*data | 32) - 'a' + 10;
            break;
        case CHUNK_END:
            if (*data == '\n') c->state = CHUNK_SIZE;
            break;
        case TRAILER: /* no trailers: the first line is the empty one */
            if (*data == '\n' && answer(c) < 0) return -1;
            break;
        case ANSWERING: /* pipelined requests are not served: no router sends them */
            return -1;
        }
        data += used;
        size -= used;
    }
    return 0;
}

static void drop(struct conn *c) {
    heap_remove(c);
    conns[c->fd] = NULL;
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

static void accept_all(int listener) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC), on = 1;
        if (fd < 0) return;
        if (fd >= MAX_FDS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct conn *c = calloc(1, sizeof *c);
        if (!c) abort();
        c->fd = fd;
        c->place = -1;
        conns[fd] = c;
        struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    }
}

static void ready(struct conn *c, uint32_t events) {
    static char buffer[1 << 18];
    if ((events & EPOLLOUT) && flush(c) < 0) {
        drop(c);
        return;
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0 || take(c, buffer, n) < 0) drop(c);
}

/* Serve connections whose time has come; return the time of the next one. */
static ns_t serve_due(ns_t limit) {
    ns_t now = now_ns();
    while (heap_size && heap[0]->due <= now) {
        struct conn *c = heap[0];
        ns_t due = c->due;
        heap_remove(c);
        if (now - due > 1000000000LL) due = now; /* after a stall: no burst to catch up */
        if (answer_on(c, due) < 0) drop(c);
    }
    return heap_size && heap[0]->due < limit ? heap[0]->due : limit;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: upstream PORT [SECONDS]\n");
        return 2;
    }
    ns_t limit = now_ns() + (argc > 2 ? atol(argv[2]) : 3600) * 1000000000LL;
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max < MAX_FDS ? files.rlim_max : MAX_FDS;
    setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGPIPE, SIG_IGN);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons(atoi(argv[1])),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 8192)) {
        perror("upstream");
        return 1;
    }
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &e);
    for (;;) {
        static struct epoll_event events[BATCH];
        ns_t wait = serve_due(limit) - now_ns();
        if (now_ns() >= limit) return 0;
        if (wait < 0) wait = 0;
        struct timespec t = {wait / 1000000000LL, wait % 1000000000LL};
        int n = epoll_pwait2(epoll_fd, events, BATCH, &t, NULL);
        for (int i = 0; i < n; i++) {
            if (events[i].data.fd == listener)
                accept_all(listener);
            else if (conns[events[i].data.fd])
                ready(conns[events[i].data.fd], events[i].events);
        }
    }
}
