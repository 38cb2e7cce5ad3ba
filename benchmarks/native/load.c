/*
 * A load generator that measures the router it drives, not only the answers.
 *
 *     cc -O2 -o load load.c
 *     ./load -p PORT -b BODY [-c CONNECTIONS] [-d SECONDS] [-w WARM_UP] [-k PID,PID...]
 *            [-R RATE] [-n COUNT] [-s] [-e EVENTS] [-r RAMP] [-K KEY] [-H]
 *
 * Talks to 127.0.0.1 only, for two minutes at most. Prints one line of JSON.
 *
 *   -R RATE    open loop: RATE requests/s, latency counted from when each was due, so that a
 *              stalled router is not spared; else closed loop: one request after the other
 *   -n COUNT   end after exactly COUNT requests, all of them inside the window
 *   -s         answers are event streams from `upstream`: its time stamps are read
 *   -e EVENTS  a stream with another number of events is an error
 *   -r RAMP    seconds over which the first requests are spread
 *   -H         hold: each connection sends one request; memory is looked at while all of them
 *              are unanswered, and all have to be answered in the end
 *   -k PIDS    whose CPU time and memory to read from /proc. CPU is the run time of all threads
 *              (schedstat, nanoseconds), read at the very begin and end of the window in which
 *              answers are counted
 *
 * All latencies are microseconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
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

enum { MAX_CONNS = 20000, MAX_HEAD = 16384, MAX_SECONDS = 120, BATCH = 1024, BACKLOG = 1 << 20 };
enum { STAMP_DIGITS = 19 };

typedef int64_t ns_t;

static const ns_t SECOND = 1000000000LL, NEVER = INT64_MAX;

static ns_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

/* --- histogram: logarithmic, 128 steps for each doubling, so within 1 % ----------------------- */

enum { STEPS = 128, STEP_BITS = 7, BUCKETS = 48 * STEPS };

struct histogram {
    long buckets[BUCKETS];
    long count;
};

static void record(struct histogram *h, ns_t value) {
    uint64_t v = value < 0 ? 0 : value / 100; /* tenths of a microsecond */
    int at = v;
    if (v >= STEPS) {
        int power = 63 - __builtin_clzll(v);
        at = (power - STEP_BITS + 1) * STEPS + (int)((v >> (power - STEP_BITS)) - STEPS);
    }
    h->buckets[at < BUCKETS ? at : BUCKETS - 1]++;
    h->count++;
}

static double quantile_us(const struct histogram *h, double q) {
    long wanted = q * h->count, seen = 0;
    for (int at = 0; at < BUCKETS; at++) {
        seen += h->buckets[at];
        if (seen <= wanted) continue;
        if (at < STEPS) return at / 10.0;
        int power = at / STEPS + STEP_BITS - 1;
        return (double)((uint64_t)(at % STEPS + STEPS) << (power - STEP_BITS)) / 10.0;
    }
    return -1;
}

/* --- the process under test -------------------------------------------------------------------- */

static int pids[64], pid_count;

static void read_pids(char *text) {
    for (char *p = strtok(text, ","); p && pid_count < 64; p = strtok(NULL, ","))
        pids[pid_count++] = atoi(p);
}

static long first_number(const char *path, int field) {
    long value = 0;
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    for (int i = 0; i <= field; i++)
        if (fscanf(f, "%ld", &value) != 1) value = 0;
    fclose(f);
    return value;
}

static ns_t cpu_of_all(void) {
    ns_t sum = 0;
    for (int i = 0; i < pid_count; i++) {
        char folder[64], path[400];
        snprintf(folder, sizeof folder, "/proc/%d/task", pids[i]);
        DIR *tasks = opendir(folder);
        for (struct dirent *e; tasks && (e = readdir(tasks));) {
            if (e->d_name[0] == '.') continue;
            snprintf(path, sizeof path, "%s/%s/schedstat", folder, e->d_name);
            sum += first_number(path, 0);
        }
        if (tasks) closedir(tasks);
    }
    return sum;
}

static long rss_of_all(void) {
    long sum = 0;
    for (int i = 0; i < pid_count; i++) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/statm", pids[i]);
        sum += first_number(path, 1) * sysconf(_SC_PAGESIZE);
    }
    return sum;
}

/* Share of this machine's time that the host gave to others. */
static void read_steal(long *stolen, long *all) {
    long v[8] = {0};
    FILE *f = fopen("/proc/stat", "r");
    if (!f) return;
    if (fscanf(f, "cpu %ld %ld %ld %ld %ld %ld %ld %ld", v, v + 1, v + 2, v + 3, v + 4, v + 5,
               v + 6, v + 7) == 8) {
        *stolen = v[7];
        *all = 0;
        for (int i = 0; i < 8; i++) *all += v[i];
    }
    fclose(f);
}

/* --- connections ------------------------------------------------------------------------------- */

enum state { IDLE, SENDING, HEAD, BODY, FINISHED };
enum framing { LENGTH, CHUNKED, UNTIL_CLOSE };
enum chunk { SIZE, DATA, DATA_END, TRAILER };

struct conn {
    int fd;
    enum state state;
    enum framing framing;
    enum chunk chunk;
    size_t sent, left, head_len;
    char head[MAX_HEAD];
    int status, closes, wants_write;
    ns_t due; /* latency counts from here */
    /* inside an event stream */
    int in_stamp, digits, seen_event;
    ns_t stamp;
    long events;
};

static struct conn *conns;
static int conn_count = 1;
static int epoll_fd;
static char *request;
static size_t request_len;
static int streams, holds;
static long expected_events, wanted_requests, begun_requests;
static double rate;
static ns_t window_begin = NEVER, window_end = NEVER;
static int stopping;

static struct histogram latency, first_byte, travel;
static long answers, errors, short_streams, chunks, reconnects, bytes;
static int outstanding, all_sent;

static ns_t *waiting; /* open loop: due times that found no free connection */
static long waiting_first, waiting_last;
static int *idle, idle_count;

static int in_window(ns_t t) { return t >= window_begin && t < window_end; }

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void watch(struct conn *c, int write_too) {
    struct epoll_event e = {.events = EPOLLIN | (write_too ? EPOLLOUT : 0), .data.u32 = c - conns};
    if (c->wants_write == write_too) return;
    c->wants_write = write_too;
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
}

static void open_conn(struct conn *c, int port) {
    static int known_port;
    if (port) known_port = port;
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons(known_port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    for (int tries = 0; connect(c->fd, (void *)&to, sizeof to); tries++) {
        if (tries == 50) die("connect");
        usleep(20000);
    }
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event e = {.events = EPOLLIN, .data.u32 = c - conns};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e);
    c->wants_write = 0;
    c->state = IDLE;
}

static void reopen(struct conn *c) {
    close(c->fd);
    reconnects++;
    if (!holds) open_conn(c, 0);
}

static void go_on_sending(struct conn *c) {
    while (c->sent < request_len) {
        ssize_t n = send(c->fd, request + c->sent, request_len - c->sent, MSG_NOSIGNAL);
        if (n < 0) {
            watch(c, errno == EAGAIN); /* a lost connection is seen by the read */
            return;
        }
        c->sent += n;
    }
    watch(c, 0);
    if (c->state == SENDING) {
        c->state = HEAD;
        all_sent++;
    }
}

static void begin(struct conn *c, ns_t due) {
    c->state = SENDING;
    c->sent = c->head_len = 0;
    c->in_stamp = c->digits = c->seen_event = 0;
    c->events = 0;
    c->due = due ? due : now_ns();
    outstanding++;
    begun_requests++;
    go_on_sending(c);
}

static void next_on(struct conn *c) {
    if (holds || stopping || (wanted_requests && begun_requests >= wanted_requests)) {
        c->state = FINISHED;
    } else if (rate <= 0) {
        begin(c, 0);
    } else if (waiting_first < waiting_last) {
        begin(c, waiting[waiting_first++ % BACKLOG]);
    } else {
        c->state = IDLE;
        idle[idle_count++] = c - conns;
    }
}

static void failed(struct conn *c) {
    outstanding--;
    if (holds || now_ns() >= window_begin) errors++;
    reopen(c);
    next_on(c);
}

static void finished(struct conn *c) {
    ns_t t = now_ns();
    int short_stream = streams && expected_events && c->events != expected_events;
    outstanding--;
    if (holds || in_window(t)) {
        if (c->status != 200 || short_stream) {
            errors++;
            short_streams += short_stream;
        } else {
            answers++;
            record(&latency, t - c->due);
        }
    }
    if (c->closes) reopen(c);
    next_on(c);
}

/* --- reading answers --------------------------------------------------------------------------- */

/* Find "@<digits>@", which may be cut anywhere. */
static void read_stamps(struct conn *c, const char *data, size_t size, ns_t t) {
    const char *end = data + size;
    while (data < end) {
        if (!c->in_stamp) {
            data = memchr(data, '@', end - data);
            if (!data) return;
            data++;
            c->in_stamp = 1;
            c->stamp = c->digits = 0;
        }
        for (; data < end && *data >= '0' && *data <= '9'; data++, c->digits++)
            c->stamp = c->stamp * 10 + *data - '0';
        if (data == end) return;
        c->in_stamp = 0;
        if (*data != '@' || c->digits != STAMP_DIGITS) continue;
        data++;
        c->events++;
        if (in_window(t)) {
            chunks++;
            record(&travel, t - c->stamp);
            if (!c->seen_event) record(&first_byte, t - c->due);
        }
        c->seen_event = 1;
    }
}

static void take_body(struct conn *c, const char *data, size_t size, ns_t t) {
    if (in_window(t)) bytes += size;
    if (streams) read_stamps(c, data, size, t);
}

/* Take more of a head; return how much was used, -1 for one that is too big. */
static ssize_t take_head(struct conn *c, const char *data, size_t size, ns_t t) {
    size_t before = c->head_len, from = before > 3 ? before - 3 : 0;
    size_t room = MAX_HEAD - 1 - before;
    if (size > room) size = room;
    memcpy(c->head + before, data, size);
    c->head_len += size;
    c->head[c->head_len] = 0;
    char *end = memmem(c->head + from, c->head_len - from, "\r\n\r\n", 4);
    if (!end) return c->head_len == MAX_HEAD - 1 ? -1 : (ssize_t)size;
    size_t used = end - c->head + 4 - before;
    *end = 0;
    c->status = c->head_len > 12 ? atoi(c->head + 9) : 0;
    if (c->status == 100) {
        c->head_len = 0;
        return used;
    }
    const char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->closes = strcasestr(c->head, "\r\nconnection: close") != NULL;
    c->left = length ? strtoul(length + 17, NULL, 10) : 0;
    c->framing = length ? LENGTH : UNTIL_CLOSE;
    c->chunk = SIZE;
    if (strcasestr(c->head, "\r\ntransfer-encoding: chunked")) {
        c->framing = CHUNKED;
        c->left = 0;
    }
    if (c->framing == UNTIL_CLOSE) c->closes = 1;
    c->state = BODY;
    if (!streams && in_window(t)) record(&first_byte, t - c->due);
    return used;
}

static size_t take_chunked(struct conn *c, const char *data, size_t size, ns_t t) {
    if (c->chunk == DATA) {
        size_t used = size < c->left ? size : c->left;
        take_body(c, data, used, t);
        c->left -= used;
        if (!c->left) c->chunk = DATA_END;
        return used;
    }
    if (c->chunk == SIZE && *data == '\n')
        c->chunk = c->left ? DATA : TRAILER;
    else if (c->chunk == SIZE && *data >= '0' && *data <= '9')
        c->left = c->left * 16 + *data - '0';
    else if (c->chunk == SIZE && (*data | 32) >= 'a' && (*data | 32) <= 'f')
        c->left = c->left * 16 + (*data | 32) - 'a' + 10;
    else if (c->chunk == DATA_END && *data == '\n')
        c->chunk = SIZE;
    else if (c->chunk == TRAILER && *data == '\n')
        finished(c);
    return 1;
}

static void take(struct conn *c, const char *data, size_t size) {
    ns_t t = now_ns();
    while (size > 0) {
        size_t used;
        if (c->state == SENDING || c->state == HEAD) { /* an answer may come early */
            ssize_t n = take_head(c, data, size, t);
            if (n < 0) {
                failed(c);
                return;
            }
            used = n;
            if (c->state == BODY && c->framing == LENGTH && !c->left) finished(c);
        } else if (c->state != BODY) {
            return;
        } else if (c->framing == CHUNKED) {
            used = take_chunked(c, data, size, t);
        } else {
            used = c->framing == LENGTH && c->left < size ? c->left : size;
            take_body(c, data, used, t);
            if (c->framing == LENGTH && !(c->left -= used)) finished(c);
        }
        data += used;
        size -= used;
    }
}

static void ready(struct conn *c, uint32_t events) {
    static char buffer[1 << 18];
    if (events & EPOLLOUT) go_on_sending(c);
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t n = recv(c->fd, buffer, sizeof buffer, 0);
    if (n > 0) {
        take(c, buffer, n);
    } else if (n == 0 || errno != EAGAIN) {
        if (c->state == IDLE || c->state == FINISHED) { /* closed between two requests */
            epoll_ctl(epoll_fd, EPOLL_CTL_DEL, c->fd, NULL);
            if (c->state == IDLE) reopen(c);
        } else if (n == 0 && c->state == BODY && c->framing == UNTIL_CLOSE) {
            finished(c);
        } else {
            failed(c);
        }
    }
}

static void turn(ns_t until) {
    static struct epoll_event events[BATCH];
    ns_t wait = until - now_ns();
    if (wait > SECOND / 20) wait = SECOND / 20;
    if (wait < 0) wait = 0;
    struct timespec t = {0, wait};
    int n = epoll_pwait2(epoll_fd, events, BATCH, &t, NULL);
    for (int i = 0; i < n; i++) ready(&conns[events[i].data.u32], events[i].events);
}

/* --- the two kinds of run ---------------------------------------------------------------------- */

static void run_hold(int port, double limit_s) {
    long rss_before = rss_of_all(), rss_held = 0, rss_peak = 0;
    ns_t begun = now_ns(), end = begun + limit_s * SECOND, sent_at = 0;
    for (int i = 0; i < conn_count; i++) {
        open_conn(&conns[i], i ? 0 : port);
        begin(&conns[i], 0);
        if (i % 50 == 49) turn(now_ns() + SECOND / 200);
    }
    while (outstanding && now_ns() < end) {
        turn(now_ns() + SECOND / 20);
        if (answers + errors) continue;
        long rss = rss_of_all();
        if (rss > rss_peak) rss_peak = rss;
        if (all_sent < conn_count) continue;
        if (!sent_at) sent_at = now_ns();
        rss_held = rss; /* the last look counts: everybody is at rest by then */
    }
    printf("{\"held\": %d, \"answers\": %ld, \"errors\": %ld, \"rss_before\": %ld, "
           "\"rss_held\": %ld, \"rss_peak\": %ld, \"sent_s\": %.3f, \"took_s\": %.3f}\n",
           conn_count, answers, errors + outstanding, rss_before, rss_held,
           rss_peak, sent_at ? (sent_at - begun) / 1e9 : -1.0, (now_ns() - begun) / 1e9);
}

static void run_load(int port, double seconds, double warm_up, double ramp) {
    ns_t begun = now_ns(), next_due = begun;
    double started = 0, per_turn = ramp > 0 ? conn_count / (ramp * 1000) : conn_count;
    int opened = 0;
    for (; opened < conn_count && rate > 0; opened++) {
        open_conn(&conns[opened], opened ? 0 : port);
        idle[idle_count++] = opened;
    }
    if (wanted_requests) window_begin = begun;
    while (opened < conn_count) {
        for (started += per_turn; opened < conn_count && opened < started; opened++) {
            open_conn(&conns[opened], opened ? 0 : port);
            begin(&conns[opened], 0);
        }
        if (ramp > 0) turn(now_ns() + SECOND / 1000);
    }
    if (wanted_requests) warm_up = 0;
    ns_t begin_at = now_ns() + warm_up * SECOND, end_at = begin_at + seconds * SECOND;
    ns_t cpu = 0, own = 0;
    long stolen[2] = {0}, all[2] = {0}, rss = 0;
    struct timespec self;
    int begun_counting = 0;
    for (;;) {
        ns_t t = now_ns();
        if (t >= begin_at && !begun_counting) {
            begun_counting = 1;
            cpu = cpu_of_all();
            read_steal(&stolen[0], &all[0]);
            clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &self);
            own = self.tv_sec * SECOND + self.tv_nsec;
            if (!wanted_requests) window_begin = now_ns();
        }
        if (t >= end_at || (wanted_requests && !outstanding)) break;
        for (; rate > 0 && next_due <= t; next_due += SECOND / rate) {
            if (idle_count)
                begin(&conns[idle[--idle_count]], next_due);
            else if (waiting_last - waiting_first < BACKLOG)
                waiting[waiting_last++ % BACKLOG] = next_due;
        }
        turn(rate > 0 && next_due < end_at ? next_due : end_at);
    }
    window_end = now_ns();
    stopping = 1;
    cpu = cpu_of_all() - cpu;
    read_steal(&stolen[1], &all[1]);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &self);
    own = self.tv_sec * SECOND + self.tv_nsec - own;
    rss = rss_of_all();
    double window = (window_end - window_begin) / 1e9;
    printf("{\"answers\": %ld, \"errors\": %ld, \"short_streams\": %ld, \"reconnects\": %ld, "
           "\"backlog\": %ld, \"per_s\": %.1f, \"chunks\": %ld, \"chunks_per_s\": %.1f, ",
           answers, errors, short_streams, reconnects, waiting_last - waiting_first,
           answers / window, chunks, chunks / window);
    printf("\"p50_us\": %.1f, \"p99_us\": %.1f, \"first_p50_us\": %.1f, \"first_p99_us\": %.1f, "
           "\"travel_p50_us\": %.1f, \"travel_p99_us\": %.1f, ",
           quantile_us(&latency, 0.5), quantile_us(&latency, 0.99), quantile_us(&first_byte, 0.5),
           quantile_us(&first_byte, 0.99), quantile_us(&travel, 0.5), quantile_us(&travel, 0.99));
    printf("\"cpu_s\": %.6f, \"busy\": %.3f, \"us_per_answer\": %.3f, \"us_per_chunk\": %.3f, "
           "\"rss\": %ld, \"generator_busy\": %.3f, \"steal\": %.4f}\n",
           cpu / 1e9, cpu / 1e9 / window, answers ? cpu / 1e3 / answers : -1.0,
           chunks ? cpu / 1e3 / chunks : -1.0, rss, own / 1e9 / window,
           all[1] > all[0] ? (double)(stolen[1] - stolen[0]) / (all[1] - all[0]) : 0.0);
}

static void make_request(const char *file, int port, const char *key) {
    FILE *f = fopen(file, "rb");
    if (!f) die(file);
    fseek(f, 0, SEEK_END);
    size_t size = ftell(f);
    rewind(f);
    request = malloc(size + 1024);
    int head = snprintf(request, 1024,
                        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                        "Content-Type: application/json\r\nAccept: */*\r\n"
                        "User-Agent: bench/1\r\nAuthorization: Bearer %s\r\n"
                        "Content-Length: %zu\r\n\r\n",
                        port, key, size);
    if (fread(request + head, 1, size, f) != size) die(file);
    request_len = head + size;
    fclose(f);
}

int main(int argc, char **argv) {
    int port = 0, option;
    double seconds = 3, warm_up = 0.5, ramp = 0;
    const char *body = NULL, *key = "sk-bench";
    while ((option = getopt(argc, argv, "p:b:c:d:w:k:R:n:se:r:K:H")) > 0) switch (option) {
        case 'p': port = atoi(optarg); break;
        case 'b': body = optarg; break;
        case 'c': conn_count = atoi(optarg); break;
        case 'd': seconds = atof(optarg); break;
        case 'w': warm_up = atof(optarg); break;
        case 'k': read_pids(optarg); break;
        case 'R': rate = atof(optarg); break;
        case 'n': wanted_requests = atol(optarg); break;
        case 's': streams = 1; break;
        case 'e': expected_events = atol(optarg); break;
        case 'r': ramp = atof(optarg); break;
        case 'K': key = optarg; break;
        case 'H': holds = 1; break;
        default: return 2;
        }
    if (!port || !body || conn_count < 1 || conn_count > MAX_CONNS ||
        seconds + warm_up + ramp > MAX_SECONDS) {
        fprintf(stderr, "load: needs -p and -b; at most %d connections and %d s\n", MAX_CONNS,
                MAX_SECONDS);
        return 2;
    }
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGPIPE, SIG_IGN);
    make_request(body, port, key);
    conns = calloc(conn_count, sizeof *conns);
    idle = calloc(conn_count, sizeof *idle);
    waiting = malloc(BACKLOG * sizeof *waiting);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (!conns || !idle || !waiting || epoll_fd < 0) die("load");
    if (holds)
        run_hold(port, seconds);
    else
        run_load(port, seconds, warm_up, ramp);
    return 0;
}
