/* The table of options and all that follows from it. A default is text like any other value and
 * goes through the same parser, so that the sample file cannot disagree with the program. */
#include "pool/node/config_table.h"

#include "proto/assert.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#define MS  UINT64_C(1000000)
#define SEC (1000 * MS)
#define MIB (UINT64_C(1) << 20)

struct unit {
    const char *name;
    uint64_t scale;
};

/* Largest first; closed by a row without a name. */
static const struct unit size_units[] = {
    {"TiB", MIB << 20}, {"GiB", MIB << 10}, {"MiB", MIB}, {"KiB", 1024}, {"", 1}, {NULL, 0}};
static const struct unit duration_units[] = {{"s", SEC}, {"ms", MS}, {"us", 1000}, {NULL, 0}};
static const struct unit count_units[] = {{"", 1}, {NULL, 0}};
static const struct unit percent_units[] = {{"%", 1}, {"", 1}, {NULL, 0}};

struct type_info {
    const char *noun;
    const char *placeholder; /* in --help */
    const struct unit *units;
};

static const struct type_info types[] = {
    [FB_OPTION_SIZE] = {"a size", "SIZE", size_units},
    [FB_OPTION_DURATION] = {"a duration", "DURATION", duration_units},
    [FB_OPTION_COUNT] = {"a count", "COUNT", count_units},
    [FB_OPTION_PERCENT] = {"a percentage", "PERCENT", percent_units},
    [FB_OPTION_MODE] = {"a file mode", "MODE", NULL},
    [FB_OPTION_BOOL] = {"a yes or no", "true|false", NULL},
    [FB_OPTION_CHOICE] = {"a choice", NULL, NULL},
    [FB_OPTION_TEXT] = {"a name", "NAME", NULL},
    [FB_OPTION_PATH] = {"a path", "PATH", NULL},
    [FB_OPTION_ADDRESS] = {"an address", "ADDRESS", NULL},
    [FB_OPTION_TENANTS] = {"a list of tenants", "NAME=PERCENT,...", NULL},
};

#define AT(field) offsetof(struct fb_config, field)
#define TEXT_MAX  (FB_CONFIG_TEXT_BYTES - 1)

const struct fb_option fb_options[] = {
    {"run_dir", FB_OPTION_PATH, AT(run_dir), "/run/forebay", 1, TEXT_MAX, NULL,
     "Directory of the sockets, one subdirectory a tenant"},
    {"chunk_dir", FB_OPTION_PATH, AT(chunk_dir), "/dev/shm/forebay", 1, TEXT_MAX, NULL,
     "Directory of the host tier's memory, on tmpfs or hugetlbfs"},
    {"socket_group", FB_OPTION_TEXT, AT(socket_group), "", 0, TEXT_MAX, NULL,
     "Group that owns the sockets; empty: the daemon's own"},
    {"socket_mode", FB_OPTION_MODE, AT(socket_mode), "0660", 0, 0777, NULL,
     "Permissions of the sockets"},
    {"host_bytes", FB_OPTION_SIZE, AT(host_bytes), "1GiB", 16 * MIB, MIB << 30, NULL,
     "Size of the host tier"},
    {"huge_pages", FB_OPTION_CHOICE, AT(huge_pages), "auto", 0, 0, "auto|never|require",
     "Whether the host tier uses huge pages"},
    {"grpc_listen", FB_OPTION_ADDRESS, AT(grpc_listen), "127.0.0.1:7400", 0, TEXT_MAX, NULL,
     "Where operators and the forebay command connect; empty: nowhere"},
    {"http_listen", FB_OPTION_ADDRESS, AT(http_listen), "127.0.0.1:7401", 0, TEXT_MAX, NULL,
     "Where metrics and probes are served; empty: nowhere"},
    {"listen_remote", FB_OPTION_BOOL, AT(listen_remote), "false", 0, 0, NULL,
     "Whether these may be addresses that other machines reach; no password is asked there"},
    {"lease", FB_OPTION_DURATION, AT(lease_ns), "30s", 100 * MS, 3600 * SEC, NULL,
     "How long a client may read what it looked up, unless it renews"},
    {"reserve", FB_OPTION_DURATION, AT(reserve_ns), "10s", 100 * MS, 3600 * SEC, NULL,
     "How long a client may take to write what it reserved"},
    {"drain", FB_OPTION_DURATION, AT(drain_ns), "10s", 0, 3600 * SEC, NULL,
     "How long running work may take to finish when the daemon is told to end"},
    {"client_share", FB_OPTION_PERCENT, AT(client_share_percent), "50", 1, 100, NULL,
     "How much of its tenant's bytes one client may hold leased, reserved and quarantined"},
    {"pin_share", FB_OPTION_PERCENT, AT(pin_share_percent), "25", 0, 100, NULL,
     "How much of a tenant's bytes hints may pin"},
    {"spin", FB_OPTION_DURATION, AT(spin_ns), "50us", 0, 10 * MS, NULL,
     "How long the reactor polls before it sleeps"},
    {"max_clients", FB_OPTION_COUNT, AT(max_clients), "256", 1, 4096, NULL,
     "Connected clients at most"},
    {"policy", FB_OPTION_TEXT, AT(policy), "lru", 1, TEXT_MAX, NULL, "Eviction policy"},
    {"log_format", FB_OPTION_CHOICE, AT(log_format), "logfmt", 0, 0, "logfmt|json",
     "Format of log lines"},
    {"log_level", FB_OPTION_CHOICE, AT(log_level), "info", 0, 0, "error|warn|info|debug",
     "Least important level that is logged"},
    {"tenants", FB_OPTION_TENANTS, AT(tenants), "default=100", 0, 0, NULL,
     "Tenants and the share of the tier each may fill"},
};

_Static_assert(sizeof(fb_options) / sizeof(fb_options[0]) == FB_OPTIONS, "count of options");
_Static_assert(sizeof(enum fb_huge_pages) == sizeof(uint32_t), "choices are stored as uint32_t");

/* ---- values ---- */

static enum fb_status parse_quantity(const char *text, const struct unit *units,
                                     uint64_t *ret_value)
{
    uint64_t number;
    char *end;

    if (!isdigit((unsigned char)*text)) {
        return FB_EINVAL;
    }
    errno = 0;
    number = strtoull(text, &end, 10);
    for (; units->name; units++) {
        if (strcmp(end, units->name) == 0) {
            bool overflow = __builtin_mul_overflow(number, units->scale, ret_value);

            return overflow || errno == ERANGE ? FB_ELIMIT : FB_OK;
        }
    }
    return FB_EINVAL;
}

/* In the largest unit that divides it. */
static void format_quantity(uint64_t value, const struct unit *units, char *out, size_t capacity)
{
    while (value % units->scale != 0) {
        units++;
    }
    snprintf(out, capacity, "%" PRIu64 "%s", value / units->scale, units->name);
}

static enum fb_status parse_mode(const char *text, uint64_t *ret_value)
{
    if (!*text || strspn(text, "01234567") != strlen(text)) {
        return FB_EINVAL;
    }
    *ret_value = strtoull(text, NULL, 8);
    return FB_OK;
}

static enum fb_status parse_choice(const char *text, const char *choices, uint64_t *ret_value)
{
    size_t length = strlen(text);
    uint64_t index = 0;

    for (const char *at = choices; *at; index++) {
        size_t n = strcspn(at, "|");

        if (n == length && memcmp(at, text, n) == 0) {
            *ret_value = index;
            return FB_OK;
        }
        at += n + (at[n] == '|');
    }
    return FB_EINVAL;
}

enum fb_status fb_address_parse(const char *text, struct fb_address *ret_address)
{
    struct fb_address address = {0};
    struct in6_addr v6;
    struct in_addr v4;
    const char *colon = strrchr(text, ':');
    uint64_t port;
    size_t n;

    if (strncmp(text, "unix:", 5) == 0) {
        n = strlen(text + 5);
        if (text[5] != '/' || n >= sizeof(((struct sockaddr_un *)0)->sun_path)) {
            return FB_EINVAL;
        }
        address.is_unix = true;
        address.is_local = true;
        memcpy(address.host, text + 5, n);
        *ret_address = address;
        return FB_OK;
    }
    if (!colon || parse_quantity(colon + 1, count_units, &port) != FB_OK || port > UINT16_MAX) {
        return FB_EINVAL;
    }
    n = (size_t)(colon - text);
    if (n >= 2 && text[0] == '[' && text[n - 1] == ']') {
        text++;
        n -= 2;
    } else if (memchr(text, ':', n)) {
        return FB_EINVAL; /* which of the colons begins the port? */
    }
    if (n == 0 || n >= sizeof(address.host)) {
        return FB_EINVAL;
    }
    memcpy(address.host, text, n);
    address.port = (uint16_t)port;
    address.is_local =
        strcmp(address.host, "localhost") == 0 ||
        (inet_pton(AF_INET, address.host, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127) ||
        (inet_pton(AF_INET6, address.host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6));
    *ret_address = address;
    return FB_OK;
}

/* ---- options ---- */

void fb_option_describe(const struct fb_option *option, char out[FB_OPTION_EXPECTED_BYTES])
{
    const struct unit *units = types[option->type].units;
    char min[32] = "";
    char max[32] = "";

    if (units) {
        format_quantity(option->min, units, min, sizeof(min));
        format_quantity(option->max, units, max, sizeof(max));
    }
    switch (option->type) {
    case FB_OPTION_SIZE:
        snprintf(out, FB_OPTION_EXPECTED_BYTES, "%s or more, such as 64GiB", min);
        break;
    case FB_OPTION_DURATION:
        snprintf(out, FB_OPTION_EXPECTED_BYTES, "%s to %s, such as %s", min, max, option->initial);
        break;
    case FB_OPTION_COUNT:
    case FB_OPTION_PERCENT: snprintf(out, FB_OPTION_EXPECTED_BYTES, "%s to %s", min, max); break;
    case FB_OPTION_MODE:
        snprintf(out, FB_OPTION_EXPECTED_BYTES, "octal digits such as \"%s\"", option->initial);
        break;
    case FB_OPTION_BOOL: snprintf(out, FB_OPTION_EXPECTED_BYTES, "true or false"); break;
    case FB_OPTION_CHOICE:
        snprintf(out, FB_OPTION_EXPECTED_BYTES, "one of %s", option->choices);
        break;
    case FB_OPTION_TEXT:
        snprintf(out, FB_OPTION_EXPECTED_BYTES, "%" PRIu64 " to %" PRIu64 " characters",
                 option->min, option->max);
        break;
    case FB_OPTION_PATH:
        snprintf(out, FB_OPTION_EXPECTED_BYTES,
                 "an absolute path of at most %" PRIu64 " characters", option->max);
        break;
    case FB_OPTION_ADDRESS:
        snprintf(out, FB_OPTION_EXPECTED_BYTES,
                 "host:port, [ipv6]:port, unix:/path, or \"\" for none");
        break;
    case FB_OPTION_TENANTS:
        snprintf(out, FB_OPTION_EXPECTED_BYTES, "name=percent, such as a=60,b=40");
        break;
    }
}

const char *fb_option_placeholder(const struct fb_option *option)
{
    return option->choices ? option->choices : types[option->type].placeholder;
}

static enum fb_status refuse(const struct fb_option *option, const char *text, const char *label,
                             enum fb_status reason, struct fb_error *error)
{
    char expected[FB_OPTION_EXPECTED_BYTES];
    const char *problem = types[option->type].noun;

    fb_option_describe(option, expected);
    if (reason == FB_ELIMIT) {
        return fb_error_set(error, FB_EINVAL, "%s: \"%.80s\" is out of range; expected %s", label,
                            text, expected);
    }
    return fb_error_set(error, FB_EINVAL, "%s: \"%.80s\" is not %s; expected %s", label, text,
                        problem, expected);
}

enum fb_status fb_config_add_tenant(struct fb_config *config, const char *name, const char *share,
                                    const char *label, struct fb_error *error)
{
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyz0123456789-";
    size_t length = strlen(name);
    uint64_t percent;
    uint64_t sum;

    if (length == 0 || length > FB_MAX_TENANT_CHARS || strspn(name, allowed) != length) {
        return fb_error_set(error, FB_EINVAL,
                            "%s: \"%.80s\" is not a tenant's name; expected 1 to %d of a-z, 0-9, -",
                            label, name, FB_MAX_TENANT_CHARS);
    }
    if (parse_quantity(share, percent_units, &percent) != FB_OK || percent < 1 || percent > 100) {
        return fb_error_set(error, FB_EINVAL,
                            "%s: \"%.80s\" is not a share for tenant %s; expected 1 to 100 (%%)",
                            label, share, name);
    }
    sum = percent;
    for (uint32_t i = 0; i < config->tenant_count; i++) {
        if (strcmp(config->tenants[i].name, name) == 0) {
            return fb_error_set(error, FB_EINVAL, "%s: tenant %s is there twice; remove one", label,
                                name);
        }
        sum += config->tenants[i].share_percent;
    }
    if (sum > 100) {
        return fb_error_set(error, FB_EINVAL,
                            "%s: with tenant %s the shares add up to %" PRIu64
                            "%%; expected at most 100%%",
                            label, name, sum);
    }
    memcpy(config->tenants[config->tenant_count].name, name, length + 1);
    config->tenants[config->tenant_count].share_percent = (uint32_t)percent;
    config->tenant_count++;
    return FB_OK;
}

void fb_config_clear_tenants(struct fb_config *config)
{
    memset(config->tenants, 0, sizeof(config->tenants));
    config->tenant_count = 0;
}

/* text  name=percent, separated by commas */
static enum fb_status tenants_set(struct fb_config *config, const struct fb_option *option,
                                  const char *text, const char *label, struct fb_error *error)
{
    const char *at = text;

    fb_config_clear_tenants(config);
    for (;;) {
        size_t n = strcspn(at, ",");
        const char *equals = memchr(at, '=', n);
        char name[FB_MAX_TENANT_CHARS + 2];
        char share[16];
        enum fb_status status;

        if (!equals) {
            return refuse(option, text, label, FB_EINVAL, error);
        }
        snprintf(name, sizeof(name), "%.*s", (int)(equals - at), at);
        snprintf(share, sizeof(share), "%.*s", (int)(at + n - equals - 1), equals + 1);
        status = fb_config_add_tenant(config, name, share, label, error);
        if (status != FB_OK || at[n] == 0) {
            return status;
        }
        at += n + 1;
    }
}

static bool in_range(const struct fb_option *option, uint64_t value)
{
    return value >= option->min && value <= option->max;
}

enum fb_status fb_option_set(struct fb_config *config, const struct fb_option *option,
                             const char *text, const char *label, struct fb_error *error)
{
    void *field = (char *)config + option->offset;
    enum fb_status status = FB_OK;
    struct fb_address address;
    uint64_t value = 0;

    switch (option->type) {
    case FB_OPTION_SIZE:
    case FB_OPTION_DURATION:
    case FB_OPTION_COUNT:
    case FB_OPTION_PERCENT: status = parse_quantity(text, types[option->type].units, &value); break;
    case FB_OPTION_MODE: status = parse_mode(text, &value); break;
    case FB_OPTION_BOOL: status = parse_choice(text, "false|true", &value); break;
    case FB_OPTION_CHOICE: status = parse_choice(text, option->choices, &value); break;
    case FB_OPTION_PATH: status = text[0] == '/' ? FB_OK : FB_EINVAL; break;
    case FB_OPTION_ADDRESS: status = *text ? fb_address_parse(text, &address) : FB_OK; break;
    case FB_OPTION_TEXT: break;
    case FB_OPTION_TENANTS: return tenants_set(config, option, text, label, error);
    }
    if (option->type == FB_OPTION_TEXT || option->type == FB_OPTION_PATH ||
        option->type == FB_OPTION_ADDRESS) {
        value = strlen(text);
    }
    if (status == FB_OK && option->max != 0 && !in_range(option, value)) {
        status = FB_ELIMIT;
    }
    if (status != FB_OK) {
        return refuse(option, text, label, status, error);
    }
    switch (option->type) {
    case FB_OPTION_SIZE:
    case FB_OPTION_DURATION: *(uint64_t *)field = value; break;
    case FB_OPTION_COUNT:
    case FB_OPTION_PERCENT:
    case FB_OPTION_MODE:
    case FB_OPTION_CHOICE: *(uint32_t *)field = (uint32_t)value; break;
    case FB_OPTION_BOOL: *(bool *)field = value != 0; break;
    default: memcpy(field, text, value + 1); break;
    }
    return FB_OK;
}

/* How many letters must be inserted, removed or replaced to make b of a. */
static size_t edit_distance(const char *a, const char *b)
{
    size_t above[FB_OPTION_NAME_BYTES + 1];
    size_t length = strlen(b);

    for (size_t j = 0; j <= length; j++) {
        above[j] = j;
    }
    for (size_t i = 1; *a; a++, i++) {
        size_t diagonal = above[0];

        above[0] = i;
        for (size_t j = 1; j <= length; j++) {
            size_t best = diagonal + (*a != b[j - 1]);

            diagonal = above[j];
            best = best < above[j] + 1 ? best : above[j] + 1;
            above[j] = best < above[j - 1] + 1 ? best : above[j - 1] + 1;
        }
    }
    return above[length];
}

const struct fb_option *fb_option_find(const char *name, const char *where, struct fb_error *error)
{
    const struct fb_option *nearest = NULL;
    size_t least = 4; /* more wrong letters than that are another word */

    for (size_t i = 0; i < FB_OPTIONS; i++) {
        size_t distance = edit_distance(name, fb_options[i].name);

        if (distance == 0) {
            return &fb_options[i];
        }
        if (distance < least) {
            least = distance;
            nearest = &fb_options[i];
        }
    }
    if (nearest) {
        fb_error_set(error, FB_EINVAL, "%sunknown option \"%.80s\"; did you mean %s?", where, name,
                     nearest->name);
    } else {
        fb_error_set(error, FB_EINVAL,
                     "%sunknown option \"%.80s\"; forebayd --print-config shows those there are",
                     where, name);
    }
    return NULL;
}

void fb_config_init(struct fb_config *config)
{
    memset(config, 0, sizeof(*config));
    for (size_t i = 0; i < FB_OPTIONS; i++) {
        enum fb_status status =
            fb_option_set(config, &fb_options[i], fb_options[i].initial, fb_options[i].name, NULL);

        FB_ASSERT(status == FB_OK);
    }
}

enum fb_status fb_config_set(struct fb_config *config, const char *name, const char *value,
                             struct fb_error *error)
{
    const struct fb_option *option = fb_option_find(name, "", error);

    return option ? fb_option_set(config, option, value, name, error) : FB_EINVAL;
}

static enum fb_status check_address(const struct fb_config *config, const char *name,
                                    const char *text, struct fb_error *error)
{
    struct fb_address address;

    if (!*text || config->listen_remote ||
        (fb_address_parse(text, &address) == FB_OK && address.is_local)) {
        return FB_OK;
    }
    return fb_error_set(error, FB_EINVAL,
                        "%s: %s can be reached from other machines, and no password is asked "
                        "there; use 127.0.0.1 or unix:/path, or set listen_remote to true",
                        name, text);
}

enum fb_status fb_config_check(const struct fb_config *config, uint64_t memory_bytes,
                               struct fb_error *error)
{
    enum fb_status status;
    char given[32];

    if (config->host_bytes > memory_bytes) {
        format_quantity(config->host_bytes, size_units, given, sizeof(given));
        return fb_error_set(error, FB_EINVAL,
                            "host_bytes: %s is more than the %.1fGiB of memory there is; expected "
                            "less than that, with room for all else that runs here",
                            given, (double)memory_bytes / (double)(MIB << 10));
    }
    status = check_address(config, "grpc_listen", config->grpc_listen, error);
    if (status != FB_OK) {
        return status;
    }
    return check_address(config, "http_listen", config->http_listen, error);
}

void fb_config_print_sample(FILE *out)
{
    struct fb_config config;

    fb_config_init(&config);
    fputs("# Configuration of forebayd. Every option is shown with its default.\n", out);
    for (size_t i = 0; i < FB_OPTIONS; i++) {
        const struct fb_option *option = &fb_options[i];
        const char *quote =
            option->type >= FB_OPTION_TEXT || option->type == FB_OPTION_MODE ? "\"" : "";
        char expected[FB_OPTION_EXPECTED_BYTES];

        fb_option_describe(option, expected);
        fprintf(out, "\n# %s.\n", option->help);
        if (option->type != FB_OPTION_TENANTS) {
            fprintf(out, "# Expected: %s.\n%s: %s%s%s\n", expected, option->name, quote,
                    option->initial, quote);
            continue;
        }
        fprintf(out, "# Expected: a list; shares are percentages, 100 together at most.\n%s:\n",
                option->name);
        for (uint32_t t = 0; t < config.tenant_count; t++) {
            fprintf(out, "  - name: %s\n    share: %u\n", config.tenants[t].name,
                    config.tenants[t].share_percent);
        }
    }
}
