/* A disk quota that is used up: loaded with LD_PRELOAD, because few machines have real quotas to test with.

While the file QUOTA_FLAG exists, nothing below QUOTA_FOLDER may grow: new files and folders, and writes behind the end
of a file, fail with EDQUOT. Writing over what is there, reading, renaming and deleting work, as with a real quota. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_used_up(void) {
    const char *flag = getenv("QUOTA_FLAG");
    return flag && faccessat(AT_FDCWD, flag, F_OK, 0) == 0;
}

static int is_below(const char *path) {
    const char *folder = getenv("QUOTA_FOLDER");
    size_t length = folder ? strlen(folder) : 0;
    return length && strncmp(path, folder, length) == 0 && (path[length] == '/' || !path[length]);
}

static int is_file_below(int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int may_not_grow(int fd, off_t end) {
    struct stat found;
    if (!is_used_up() || fstat(fd, &found) || !S_ISREG(found.st_mode) || !is_file_below(fd)) return 0;
    return end > found.st_size;
}

static off_t end_of(int fd, size_t count) {
    if (fcntl(fd, F_GETFL) & O_APPEND) return LLONG_MAX;
    return lseek(fd, 0, SEEK_CUR) + (off_t)count;
}

static int may_not_create(int folder, const char *name) {
    char path[PATH_MAX * 2];
    if (!is_used_up() || faccessat(folder, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0) return 0;
    if (name[0] == '/') return is_below(name);
    if (folder != AT_FDCWD) return is_file_below(folder);
    if (!getcwd(path, PATH_MAX)) return 0;
    strcat(strcat(path, "/"), name);
    return is_below(path);
}

#define REFUSE do { errno = EDQUOT; return -1; } while (0)

#define OPENS(name)                                                                     \
    int name(const char *path, int flags, ...) {                                        \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
        if ((flags & O_CREAT) && may_not_create(AT_FDCWD, path)) REFUSE;                \
        return NEXT(name)(path, flags, mode);                                           \
    }
#define OPENS_AT(name)                                                                  \
    int name(int folder, const char *path, int flags, ...) {                            \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
        if ((flags & O_CREAT) && may_not_create(folder, path)) REFUSE;                  \
        return NEXT(name)(folder, path, flags, mode);                                   \
    }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

int mkdir(const char *path, mode_t mode) {
    if (may_not_create(AT_FDCWD, path)) REFUSE;
    return NEXT(mkdir)(path, mode);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    if (may_not_create(folder, path)) REFUSE;
    return NEXT(mkdirat)(folder, path, mode);
}
ssize_t write(int fd, const void *data, size_t count) {
    if (may_not_grow(fd, end_of(fd, count))) REFUSE;
    return NEXT(write)(fd, data, count);
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) {
    if (may_not_grow(fd, at + (off_t)count)) REFUSE;
    return NEXT(pwrite)(fd, data, count, at);
}
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
    if (may_not_grow(fd, at + (off_t)count)) REFUSE;
    return NEXT(pwrite64)(fd, data, count, at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (may_not_grow(fd, LLONG_MAX)) REFUSE;
    return NEXT(writev)(fd, parts, count);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    if (may_not_grow(fd, LLONG_MAX)) REFUSE;
    return NEXT(pwritev)(fd, parts, count, at);
}
int fallocate(int fd, int mode, off_t at, off_t count) {
    if (!(mode & FALLOC_FL_PUNCH_HOLE) && may_not_grow(fd, at + count)) REFUSE;
    return NEXT(fallocate)(fd, mode, at, count);
}
int posix_fallocate(int fd, off_t at, off_t count) {
    return may_not_grow(fd, at + count) ? EDQUOT : NEXT(posix_fallocate)(fd, at, count);
}
