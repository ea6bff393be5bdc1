// The bounded string functions that torchair expects CANN's libraries to bring along. They return 0 or the length, and
// an error leaves an empty string.
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

extern "C" {

int strcpy_s(char* target, size_t room, const char* source) {
    if (!target || !room) return EINVAL;
    size_t length = source ? std::strlen(source) : room;
    if (length >= room) {
        *target = 0;
        return source ? ERANGE : EINVAL;
    }
    std::memcpy(target, source, length + 1);
    return 0;
}

// Writes at most `count` characters, which is less than `room`; a longer text is cut, and -1 returned.
int vsnprintf_s(char* target, size_t room, size_t count, const char* pattern, va_list values) {
    if (!target || !room) return -1;
    *target = 0;
    if (!pattern) return -1;
    size_t most = count < room ? count : room - 1;
    int length = std::vsnprintf(target, most + 1, pattern, values);
    if (length >= 0 && static_cast<size_t>(length) <= most) return length;
    if (length < 0 || count >= room) *target = 0;
    return -1;
}

int snprintf_s(char* target, size_t room, size_t count, const char* pattern, ...) {
    va_list values;
    va_start(values, pattern);
    int length = vsnprintf_s(target, room, count, pattern, values);
    va_end(values);
    return length;
}

}  // extern "C"
