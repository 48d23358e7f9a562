/*
 * Carries forwarded connections (docs/KUBERNETES.md, "Port-forward") or DNS queries (docs/NETWORK.md) inside the guest.
 *
 *   relay        holds its container open until it is killed
 *   relay PORT   connects to that port of the guest's loopback, IPv4 first, and copies both ways between the socket and
 *                its standard streams. Ends with 0 at the end of what the listener says; with connect's errno when
 *                nothing listens.
 *   relay resolve ADDRESS
 *                takes DNS queries at port 53 of that IPv4 address. Each is written to the standard output, two bytes of
 *                length (big-endian) first; answers come so from the standard input. Ends with errno or at its end.
 *
 * The guest's images need not contain any program, so the shim copies this one into its share: static, no files needed.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

/* Bytes: one read of a stream; the shim reads at most 256 KiB of a process's output at a time. */
#define BUFFER_BYTES 65536

/* All that can be read from `from` is in `to`, up to its end or an error of either. */
static void copy(int from, int to)
{
	static char buffer[BUFFER_BYTES];
	ssize_t got, put, sent;

	while ((got = read(from, buffer, sizeof buffer)) > 0)
		for (sent = 0; sent < got; sent += put)
			if ((put = write(to, buffer + sent, got - sent)) <= 0)
				return;
}

/* A connected socket, or -1 with errno set. */
static int dial(const struct sockaddr *address, socklen_t length)
{
	int fd = socket(address->sa_family, SOCK_STREAM, 0), cause;

	if (fd < 0 || connect(fd, address, length) == 0)
		return fd;
	cause = errno;
	close(fd);
	errno = cause;
	return -1;
}

static int dial_loopback(int port)
{
	struct sockaddr_in ipv4 = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)
	};
	struct sockaddr_in6 ipv6 = {
		.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT
	};
	int fd = dial((struct sockaddr *)&ipv4, sizeof ipv4);

	return fd >= 0 ? fd : dial((struct sockaddr *)&ipv6, sizeof ipv6);
}

#define DNS_PORT 53
#define DNS_HEADER_BYTES 12
#define MESSAGE_BYTES 65535
/* Queries under way; the oldest is forgotten for one more, as a lost datagram. */
#define QUERIES 1024

/* Whom an answer is for: its id, on the way to the host, is the number of the query. */
static struct query {
	struct sockaddr_in client;
	unsigned char id[2];
} queries[QUERIES];

static int write_all(int to, const unsigned char *data, size_t left)
{
	ssize_t put;

	for (; left > 0; data += put, left -= put)
		if ((put = write(to, data, left)) <= 0)
			return -1;
	return 0;
}

/* A query of a client is on the standard output; what is no DNS message is dropped. */
static int take_query(int fd)
{
	static unsigned char frame[2 + MESSAGE_BYTES];
	static unsigned next;
	unsigned number = next % QUERIES;
	struct sockaddr_in client;
	socklen_t length = sizeof client;
	ssize_t got = recvfrom(fd, frame + 2, MESSAGE_BYTES, 0, (struct sockaddr *)&client, &length);

	if (got < DNS_HEADER_BYTES)
		return 0;
	next++;
	queries[number].client = client;
	memcpy(queries[number].id, frame + 2, 2);
	frame[0] = got >> 8;
	frame[1] = got & 0xff;
	frame[2] = number >> 8;
	frame[3] = number & 0xff;
	return write_all(STDOUT_FILENO, frame, 2 + got);
}

static void give_answer(int fd, unsigned char *message, size_t length)
{
	unsigned number = message[0] << 8 | message[1];

	if (length < DNS_HEADER_BYTES || number >= QUERIES || queries[number].client.sin_port == 0)
		return;
	memcpy(message, queries[number].id, 2);
	sendto(fd, message, length, 0, (struct sockaddr *)&queries[number].client, sizeof queries[number].client);
	queries[number].client.sin_port = 0;
}

/* The answers that have come whole are with their clients. 0 at the end of the standard input. */
static int give_answers(int fd)
{
	static unsigned char buffer[2 * (2 + MESSAGE_BYTES)];
	static size_t held;
	size_t at = 0, length;
	ssize_t got = read(STDIN_FILENO, buffer + held, sizeof buffer - held);

	if (got <= 0)
		return 0;
	for (held += got; held - at >= 2; at += 2 + length) {
		length = buffer[at] << 8 | buffer[at + 1];
		if (held - at < 2 + length)
			break;
		give_answer(fd, buffer + at + 2, length);
	}
	held -= at;
	memmove(buffer, buffer + at, held);
	return 1;
}

static int resolve(const char *text)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(DNS_PORT) };
	struct pollfd ready[2] = { { .fd = STDIN_FILENO, .events = POLLIN }, { .events = POLLIN } };

	if (inet_pton(AF_INET, text, &address.sin_addr) != 1)
		return EINVAL;
	ready[1].fd = socket(AF_INET, SOCK_DGRAM, 0);
	if (ready[1].fd < 0 || bind(ready[1].fd, (struct sockaddr *)&address, sizeof address) != 0)
		return errno;
	while (poll(ready, 2, -1) > 0) {
		if (ready[1].revents && take_query(ready[1].fd) != 0)
			return errno;
		if (ready[0].revents && !give_answers(ready[1].fd))
			return 0;
	}
	return errno;
}

int main(int argc, char **argv)
{
	int fd;

	if (argc == 3 && strcmp(argv[1], "resolve") == 0)
		return resolve(argv[2]);
	if (argc < 2) {
		signal(SIGCHLD, SIG_IGN); /* processes that lose their parent become ours: the kernel reaps them */
		for (;;)
			pause();
	}
	if ((fd = dial_loopback(atoi(argv[1]))) < 0)
		return errno;
	switch (fork()) {
	case -1:
		return errno;
	case 0: /* client to listener, for as long as the other half lives */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		copy(STDIN_FILENO, fd);
		shutdown(fd, SHUT_WR);
		return 0;
	default:
		copy(fd, STDOUT_FILENO);
		return 0;
	}
}
