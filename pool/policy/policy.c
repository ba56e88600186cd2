/* The table of eviction policies. Constant; any thread. */
#include "pool/policy/policy.h"

#include <string.h>

static const struct fb_policy_ops *const policies[] = {
    &fb_policy_lru,
};

const struct fb_policy_ops *fb_policy_find(const char *name)
{
    for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++) {
        if (strcmp(policies[i]->name, name) == 0) {
            return policies[i];
        }
    }
    return NULL;
}

const char *fb_policy_name(uint32_t i)
{
    return i < sizeof(policies) / sizeof(policies[0]) ? policies[i]->name : NULL;
}
