"""A GPU to run a kernel on in Python: threads, and memory that knows what may be touched, and when.

One thread runs at a time. Which is next, and when parts of copies land, comes from a seed: a failure can be repeated.
Races show whatever is drawn: each thread has a vector clock, and an access fails that does not surely come after those
before it, in whatever order they came. Barriers order, barrier objects too, and shuffles nothing.
"""

import functools
import operator
import re
import threading
from random import Random
from types import SimpleNamespace

import numpy as np
from loss_cutedsl import (
    _cross_entropy_forward,
    _cross_entropy_plain,
    _cross_entropy_rows,
    _cross_entropy_total,
    _device,
    _meeting_rows,
    _registers,
    softmax,
)
from loss_cutedsl._schedule import VECTOR_BYTES

MODULES = (
    _device, _meeting_rows, _registers, _cross_entropy_rows, _cross_entropy_total, _cross_entropy_plain,
    _cross_entropy_forward, softmax,
)  # fmt: skip
float32 = np.float32
NAN = float32(np.nan)
SHARED_BEGIN = 1024
FAR = 1 << 32


def lowest(kernel):
    """In the place of ``StagedRows.lowest``: a word of -inf elements as words are here."""
    return (float32(-np.inf),) * (kernel.width // 4)


class Memory:
    """Global memory: tensors, each at a place of its own, by the address of an element."""

    def __init__(self):
        self.cells, self.sizes, self.writable, self.writer = {}, {}, set(), {}

    def tensor(self, place, size, values, writable=(), offset=0):
        """The address of a tensor that begins ``offset`` elements into a vector; ``writable``: numbers of elements."""
        begin = FAR * place + offset * size
        self.sizes[place] = size
        self.cells.update((begin + i * size, value) for i, value in enumerate(values))
        self.writable |= {begin + i * size for i in writable}
        return begin

    def vector(self, place, size, values, writable=True):
        return self.tensor(place, size, values, range(len(values)) if writable else ())

    def matrix(self, place, size, values, stride, offset=0, writable=False):
        """The address of rows; what lies between them may be read, and must not be used."""
        rows, cols = values.shape
        elements = np.full((rows, stride), NAN, float32)
        elements[:, :cols] = values
        writable = [row * stride + col for row in range(rows) for col in range(cols)] if writable else ()
        return self.tensor(place, size, elements.ravel()[: (rows - 1) * stride + cols], writable, offset)

    def written_matrix(self, begin, size, shape, stride):
        """Rows all of whose elements have been written."""
        rows, cols = shape
        addresses = [[begin + (row * stride + col) * size for col in range(cols)] for row in range(rows)]
        assert all(address in self.writer for row in addresses for address in row), "not written"
        return np.array([[self.cells[address] for address in row] for row in addresses], float32)

    def words(self, place, count):
        """The first elements of a tensor of four bytes each, as they are now."""
        return [self.cells[FAR * place + 4 * i] for i in range(count)]

    def read(self, address, size):
        assert self.sizes[address // FAR] == size
        assert address in self.cells, "read outside the tensors"
        return self.cells[address]

    def write(self, address, size, value, thread):
        assert self.sizes[address // FAR] == size
        assert address in self.writable, "written outside the rows"
        assert self.writer.setdefault(address, thread) == thread, "written by two threads"
        self.cells[address] = value


class Stopped(BaseException):
    """Another thread has failed."""


class Turns:
    """Threads that take turns; whoever waits for something is woken by name."""

    def __init__(self, seed, count):
        self.random = Random(seed)
        # Some threads are faster than others all along.
        self.slowness = self.random.sample(range(count), count)
        self.locks = [threading.Lock() for _ in range(count)]
        self.here, self.over, self.error = threading.local(), threading.Event(), None
        self.ready, self.waiting, self.events, self.alive = [], {}, [], count

    def run(self, function, ended):
        """All threads, until the last has ended; ``ended`` is told of each."""
        threads = []
        for number, lock in enumerate(self.locks):
            lock.acquire()
            threads.append(threading.Thread(target=self.one, args=(function, ended, number), daemon=True))
            threads[-1].start()
        self.locks[self.choose()].release()
        if not self.over.wait(timeout=60):
            self.fail(TimeoutError("threads run on and on"))
        for thread in threads:
            thread.join(timeout=10)
        if self.error:
            raise self.error

    def one(self, function, ended, number):
        self.here.number = number
        try:
            self.wait_for_turn()
            with np.errstate(all="ignore"):
                function()
            self.alive -= 1
            ended(number)
            if self.alive:
                self.locks[self.choose()].release()
            else:
                self.over.set()
        except Stopped:
            pass
        except BaseException as error:
            self.fail(error)

    def fail(self, error):
        self.error = self.error or error
        for lock in self.locks:
            if lock.locked():
                lock.release()
        self.over.set()

    def wait_for_turn(self):
        self.locks[self.here.number].acquire()
        if self.error:
            raise Stopped

    def choose(self):
        while self.events and (not self.ready or self.random.random() < 0.1):
            self.events.pop(self.random.randrange(len(self.events)))()
        assert self.ready, f"all threads wait: { ({what[0]: len(threads) for what, threads in self.waiting.items()}) }"
        two = self.random.choices(range(len(self.ready)), k=2)
        return self.ready.pop(min(two, key=lambda index: self.slowness[self.ready[index]]))

    def pass_on(self):
        chosen = self.choose()
        if chosen != self.here.number:
            self.locks[chosen].release()
            self.wait_for_turn()

    def pause(self):
        """A point where another thread may come first."""
        if self.random.random() < 0.3:
            self.ready.append(self.here.number)
            self.pass_on()

    def wait(self, what):
        self.waiting.setdefault(what, []).append(self.here.number)
        self.pass_on()

    def wake(self, what):
        self.ready += self.waiting.pop(what, [])


class Order:
    """What surely comes before what: a clock for each thread, and the accesses to each address."""

    def __init__(self, count):
        self.now = np.eye(count, dtype=np.int32)
        self.writer, self.readers = {}, {}

    def new(self):
        return np.zeros_like(self.now[0])

    def give(self, thread, clock):
        """Whoever takes this clock comes after what the thread has done."""
        np.maximum(clock, self.now[thread], out=clock)
        self.now[thread, thread] += 1

    def take(self, thread, clock):
        np.maximum(clock, self.now[thread], out=self.now[thread])

    def reads(self, thread, address):
        writer, time = self.writer.get(address, (thread, 0))
        assert self.now[thread, writer] >= time, "read in no order with what was written"
        self.readers.setdefault(address, {})[thread] = self.now[thread, thread]

    def writes(self, thread, address):
        writer, time = self.writer.get(address, (thread, 0))
        assert self.now[thread, writer] >= time, "written twice, in no order"
        for reader, time in self.readers.pop(address, {}).items():
            assert self.now[thread, reader] >= time, "written in no order with a read"
        self.writer[address] = thread, self.now[thread, thread]


class BarrierObject:
    """See ``_device.make_mbarrier``."""

    def __init__(self, key, count, maker, clock):
        self.key, self.count, self.pending, self.bytes, self.phase = key, count, count, 0, 0
        self.maker, self.shown, self.from_afar = maker, False, False
        self.clock, self.passed, self.landed = clock, clock.copy(), []


class Launch:
    """One launch: its threads, shared memory, and what the kernel calls of the device's.

    Of a block's ``shared_bytes`` the first ``word_bytes`` are words and barrier objects, and the others vectors.
    ``neighbours_write``: a vector that is copied may have elements of another row, of which nothing is used, and which
    that row's block may be overwriting.
    """

    def __init__(self, kernel, memory, grid, seed, resident, *, shared_bytes, word_bytes, neighbours_write=False):
        self.memory, self.grid, self.neighbours_write = memory, grid, neighbours_write
        self.schedule, self.size, self.width = kernel.schedule, kernel.element_bytes, kernel.width
        self.part = self.width // 4
        self.eviction = kernel.eviction
        self.words_end, self.shared_end = SHARED_BEGIN + word_bytes, SHARED_BEGIN + shared_bytes
        self.in_cluster = self.schedule.threads * self.schedule.cluster
        count = grid * self.schedule.threads
        self.turns, self.order = Turns(seed, count), Order(count)
        self.shared, self.kinds, self.on_the_way, self.objects = {}, {}, set(), {}
        self.meetings, self.waits, self.seen, self.versions, self.atomics = {}, {}, {}, {}, {}
        self.arrived = [{} for _ in range(grid // self.schedule.cluster)]
        self.known, self.unsettled = [set() for _ in range(count)], [set() for _ in range(count)]
        # Of each thread the copies that it has asked for: groups, the last of which it has not committed.
        self.copies = [[[]] for _ in range(count)]
        self.alive = [self.schedule.threads] * grid
        # Of each block what its threads have seen when they ended, and what has been sent to it: by whom and when.
        self.ends, self.sent = [self.order.new() for _ in range(grid)], [[] for _ in range(grid)]
        # Clusters start in any order, and no more than ``resident`` run at a time.
        self.to_start = self.turns.random.sample(range(0, count, self.in_cluster), count // self.in_cluster)
        for _ in range(resident):
            self.start_cluster()

    def start_cluster(self):
        if self.to_start:
            begin = self.to_start.pop()
            self.turns.ready += range(begin, begin + self.in_cluster)

    def run(self, monkeypatch, function, **arguments):
        with monkeypatch.context() as patch:
            primitives = self.primitives()
            for module in MODULES:
                for key, value in primitives.items():
                    if hasattr(module, key):
                        patch.setattr(module, key, value)
            self.turns.run(lambda: function(**arguments), self.ended)

    def ended(self, thread):
        assert not any(self.copies[thread]), "a thread has ended with copies on the way"
        block = thread // self.schedule.threads
        self.alive[block] -= 1
        self.order.give(thread, self.ends[block])
        if self.alive[block] == 0:
            for writer, time in self.sent[block]:
                assert self.ends[block][writer] >= time, "a block has ended to which something may be on the way"
            first = block // self.schedule.cluster * self.schedule.cluster
            if not any(self.alive[first : first + self.schedule.cluster]):
                self.start_cluster()

    def primitives(self):
        arch = SimpleNamespace(
            thread_idx=lambda: (self.me % self.schedule.threads, 0, 0),
            block_idx=lambda: (self.block, 0, 0),
            grid_dim=lambda: (self.grid, 1, 1),
            get_dyn_smem=lambda kind, alignment: SimpleNamespace(toint=lambda: SHARED_BEGIN),
        )
        own = ARITHMETIC | {
            name: getattr(self, name) for name in vars(Launch) if name in vars(_device) and name[0] != "_"
        }
        return own | {"cute": SimpleNamespace(arch=arch), "Uint32": lambda word: (float32(word),) * self.part}

    @property
    def me(self):
        return self.turns.here.number

    @property
    def block(self):
        return self.me // self.schedule.threads

    # Threads that meet

    def meet(self, key, count, ordered=True, value=None, combine=None):
        """Wait for so many threads; what all of them brought, or what the last has made of it."""
        if key not in self.meetings:
            self.meetings[key] = {}, self.order.new(), count
        values, clock, wanted = self.meetings[key]
        assert wanted == count
        assert self.me not in values
        values[self.me] = value
        if ordered:
            self.order.give(self.me, clock)
        if len(values) == count:
            del self.meetings[key]
            if combine:
                values.update(combine(values))
            self.turns.wake((key, id(values)))
            self.turns.pause()
        else:
            self.turns.wait((key, id(values)))
        if ordered:
            self.order.take(self.me, clock)
        return values

    def barrier(self):
        self.meet(("block", self.block), self.schedule.threads)

    def cluster_barrier(self):
        self.meet(("cluster", self.me // self.in_cluster), self.in_cluster)

    def cluster_arrive(self):
        """Once a launch. It orders nothing: what the others learn of are the barrier objects that have been shown."""
        arrived = self.arrived[self.me // self.in_cluster]
        assert self.me not in arrived
        arrived[self.me] = {found for found in self.objects.values() if found.maker == self.me and found.shown}
        if len(arrived) == self.in_cluster:
            self.turns.wake(("cluster", id(arrived)))
        self.turns.pause()

    def cluster_wait(self):
        arrived = self.arrived[self.me // self.in_cluster]
        assert self.me in arrived
        while len(arrived) < self.in_cluster:
            self.turns.wait(("cluster", id(arrived)))
        self.known[self.me].update(*arrived.values())

    def warp_barrier(self):
        self.meet(("warp", self.me // 32), 32)

    def shuffle_xor(self, value, distance):
        return self.meet(("shuffle", self.me // 32, distance), 32, False, value)[self.me ^ distance]

    shuffle_xor_64 = shuffle_xor

    def warp_reduce(self, value, combine):
        """Five shuffles at once."""

        def reduced(values):
            for distance in (16, 8, 4, 2, 1):
                values = {thread: combine(value, values[thread ^ distance]) for thread, value in values.items()}
            return values

        return self.meet(("reduce", self.me // 32), 32, False, value, reduced)[self.me]

    # Shared memory

    def key(self, address, kind, words, block=None):
        """Of shared memory; each word is of one kind for good."""
        assert address % (4 * words) == 0
        begin, end = (self.words_end, self.shared_end) if kind == "vector" else (SHARED_BEGIN, self.words_end)
        assert begin <= address <= end - 4 * words
        key = ((self.block if block is None else block) << 24) + address
        for word in range(words):
            assert self.kinds.setdefault(key + 4 * word, (kind, key)) == (kind, key), "two things at one place"
        return key

    def pieces(self, key):
        """What is at a key, and in order by itself: a word, or each element of a vector."""
        return range(key, key + VECTOR_BYTES, self.size) if self.kinds[key][0] == "vector" else [key]

    def read_shared(self, key, pieces, unknown):
        assert key not in self.on_the_way, "read before it is there"
        for piece in pieces:
            self.order.reads(self.me, piece)
        self.unsettled[self.me].discard(key)
        return self.shared.get(key, unknown)

    def write_shared(self, key, pieces, value):
        assert key not in self.on_the_way, "written while something else is on its way there"
        for piece in pieces:
            self.order.writes(self.me, piece)
        self.unsettled[self.me].add(key)
        self.shared[key] = value

    def load_shared_word(self, address, kind="word", words=1, unknown=-1234567):
        key = self.key(address, kind, words)
        return self.read_shared(key, self.pieces(key), unknown)

    def store_shared_word(self, address, value, kind="word", words=1):
        key = self.key(address, kind, words)
        self.write_shared(key, self.pieces(key), value)

    def load_shared(self, address):
        return self.load_shared_word(address, "vector", 4, self.unknown_vector())

    def store_shared(self, address, words):
        self.store_shared_word(address, list(words), "vector", 4)

    def unknown_vector(self):
        return [(NAN,) * self.part] * 4

    def vector_and_lane(self, address):
        """Of an element: its vector's key, and its number there."""
        begin = address - address % VECTOR_BYTES
        return self.key(begin, "vector", 4), (address - begin) // self.size

    def load_shared_element(self, address):
        """Among words one of them, among vectors an element of one."""
        if address < self.words_end:
            return self.load_shared_word(address)
        key, lane = self.vector_and_lane(address)
        return self.unpack(None, self.read_shared(key, self.pieces(key)[lane : lane + 1], self.unknown_vector()))[lane]

    def store_shared_element(self, address, value):
        """Likewise."""
        if address < self.words_end:
            self.store_shared_word(address, value)
            return
        key, lane = self.vector_and_lane(address)
        elements = self.unpack(None, self.shared.get(key, self.unknown_vector()))
        elements[lane] = value
        self.write_shared(key, self.pieces(key)[lane : lane + 1], self.words(elements))

    # Copies that a thread waits for. They may land at any time until then: whatever touches the place meanwhile fails.

    def copy_async(self, address, g_address, wanted, policy):
        assert policy == self.eviction, "copied by another policy than the kernel's"
        if wanted:
            key = self.key(address, "vector", 4)
            assert key not in self.on_the_way, "two copies to one place"
            # A store that is neither read nor followed by a wait may come after the copy.
            assert key not in self.unsettled[self.me], "a copy in no order with a store"
            for piece in self.pieces(key):
                self.order.writes(self.me, piece)
            self.on_the_way.add(key)
            read = self.memory.read if self.neighbours_write else self.read
            self.copies[self.me][-1].append((key, self.read_vector(g_address, read)))

    def commit(self):
        self.copies[self.me].append([])

    def wait(self, pending):
        groups = self.copies[self.me]
        while len(groups) - 1 > pending:
            for key, vector in groups.pop(0):
                # So that who looks at it comes after this wait.
                for piece in self.pieces(key):
                    self.order.writes(self.me, piece)
                self.on_the_way.remove(key)
                self.shared[key] = vector
        self.unsettled[self.me].clear()
        self.turns.pause()

    # Barrier objects

    def object(self, address, block=None):
        key = self.key(address, "barrier object", 2, block)
        assert key in self.objects, "a barrier object that has not been made"
        found = self.objects[key]
        if found not in self.known[self.me]:
            assert found.shown, "a barrier object that has not been shown"
            self.order.reads(self.me, key)
            self.known[self.me].add(found)
        return found

    def make_mbarrier(self, address, count):
        key = self.key(address, "barrier object", 2)
        assert key not in self.objects
        self.order.writes(self.me, key)
        self.objects[key] = BarrierObject(key, count, self.me, self.order.new())
        self.known[self.me].add(self.objects[key])

    def show_mbarriers(self):
        for found in self.objects.values():
            found.shown |= found.maker == self.me

    def arrive_and_expect(self, address, size):
        found = self.object(address)
        self.order.give(self.me, found.clock)
        found.bytes += size
        found.pending -= 1
        self.pass_phase(found)
        self.turns.pause()

    def pass_phase(self, found):
        assert found.pending >= 0
        if found.pending == 0 and found.bytes == 0:
            found.pending, found.passed, found.phase = found.count, found.clock.copy(), found.phase + 1
            for key, value in found.landed:
                self.shared[key] = value
                self.on_the_way.remove(key)
            found.landed = []
            self.turns.wake(("object", found.key))

    def wait_for(self, address, parity, scope="cta"):
        found = self.object(address)
        # The phase before the first is over from the start. A thread waits for each phase, one after the other.
        phase = self.waits[self.me, found.key] = self.waits.get((self.me, found.key), -1 - parity) + 1
        assert phase & 1 == parity, "a phase left out, or waited for twice"
        self.turns.pause()
        while found.phase & 1 == parity:
            self.turns.wait(("object", found.key))
        assert found.phase == phase + 1, "another phase than the one waited for"
        assert scope == "cluster" or not found.from_afar, "what another block has sent is not seen"
        self.order.take(self.me, found.passed)

    # What lands later

    def send(self, address, words, s_barrier, block, wanted):
        """At any time from now on the words are there, all of them together."""
        if not wanted:
            return
        block += self.block // self.schedule.cluster * self.schedule.cluster
        assert self.alive[block] > 0, "sent to a block that has ended"
        found = self.object(s_barrier, block)
        found.from_afar |= block != self.block
        sent = {self.key(address + 4 * i, "word", 1, block): word for i, word in enumerate(words)}
        for key in sent:
            assert key not in self.on_the_way, "two copies to one place"
            self.order.writes(self.me, key)
            self.on_the_way.add(key)
        self.sent[block].append((self.me, self.order.now[self.me, self.me]))
        clock = self.order.new()
        self.order.give(self.me, clock)

        def land():
            found.landed += sent.items()
            found.bytes -= 4 * len(sent)
            np.maximum(found.clock, clock, out=found.clock)
            self.pass_phase(found)

        self.turns.events.append(land)
        self.turns.pause()

    def l2_policy(self, eviction):
        return eviction

    # Registers: a vector is four words, a word one element or two

    def words(self, elements):
        return [tuple(elements[i : i + self.part]) for i in range(0, self.width, self.part)]

    def pack(self, dtype, values):
        return self.words(values)

    def unpack(self, dtype, words):
        return [element for word in words for element in word]

    # Global memory

    def read(self, address, size):
        self.order.reads(self.me, address)
        return self.memory.read(address, size)

    def write(self, address, size, value):
        self.order.writes(self.me, address)
        self.memory.write(address, size, value, self.me)

    def load_element(self, dtype, address, space="global"):
        return self.load_shared_element(address) if space == "shared" else self.read(address, self.size)

    def store_element(self, dtype, address, value, space="global", predicate=True):
        if predicate and space == "shared":
            self.store_shared_element(address, value)
        elif predicate:
            self.write(address, self.size, value)

    def load_element_below(self, dtype, address, index, bound):
        return self.read(address, self.size) if 0 <= index < bound else float32(0.0)

    def read_vector(self, address, read):
        assert address % VECTOR_BYTES == 0
        return self.words([read(address + at, self.size) for at in range(0, VECTOR_BYTES, self.size)])

    def load_global(self, address, wanted=None, policy=None):
        assert wanted is None
        assert policy == self.eviction, "asked for by another policy than the kernel's"
        return self.read_vector(address, self.read)

    def load_global_or(self, address, wanted, word, policy=None):
        assert policy in (None, self.eviction)
        return self.read_vector(address, self.read) if wanted else [word] * 4

    def store_global(self, address, words, predicate=None):
        if predicate is None or predicate:
            assert address % VECTOR_BYTES == 0
            for lane, value in enumerate(self.unpack(None, words)):
                self.write(address + lane * self.size, self.size, value)

    def load_float(self, address):
        return self.read(address, 4)

    def store_float(self, address, value):
        self.write(address, 4, value)
        self.turns.pause()

    def load_floats(self, address, wanted):
        assert address % VECTOR_BYTES == 0
        return [self.read(address + 4 * i, 4) if wanted else float32(0.0) for i in range(4)]

    def load_integer(self, bits, address):
        return self.read(address, bits // 8)

    # The workspace: words of 32 bits. Atomic accesses are in order with one another, and stores have to be with them.

    def atomic(self, address, change, words=1):
        """Change one or two words; the number before."""
        self.turns.pause()
        assert address % (4 * words) == 0
        before = 0
        for i in range(words):
            before += self.read(address + 4 * i, 4) << 32 * i
        after = change(before)
        for i in range(words):
            assert address + 4 * i in self.memory.writable
            self.memory.cells[address + 4 * i] = after >> 32 * i & 2**32 - 1
        self.versions[address] = self.versions.get(address, 0) + (after != before)
        self.turns.wake(("word", address))
        self.turns.pause()
        return before

    def add_64(self, address, value):
        self.atomic(address, lambda number: number + int(value), 2)

    def look(self, address):
        """Who looks at the same for the third time waits until there is something new, or for ever."""
        last = [(address, self.versions.get(address, 0))] * 2
        while self.seen.get(self.me) == last:
            self.turns.wait(("word", address))
            last = [(address, self.versions[address])] * 2
        self.seen[self.me] = [*self.seen.get(self.me, ()), last[0]][-2:]

    def load_relaxed_64(self, address):
        self.look(address)
        return self.atomic(address, lambda number: number, 2)

    def load_relaxed_four(self, address, wanted):
        """Each by itself, of which the first that is missing is waited for."""
        if not wanted:
            return [0] * 4
        assert address % VECTOR_BYTES == 0
        words = range(address, address + VECTOR_BYTES, 4)
        self.look(next((word for word in words if not self.memory.cells[word]), address))
        return [self.atomic(word, lambda number: number) for word in words]

    def store_relaxed(self, address, word):
        self.atomic(address, lambda number: word)

    def store_relaxed_64(self, address, word):
        self.atomic(address, lambda number: word, 2)

    def store_relaxed_four(self, address, words):
        for i, word in enumerate(words):
            self.store_relaxed(address + 4 * i, word)

    def exchange_add(self, address, value):
        clock = self.atomics.setdefault(address, self.order.new())

        def change(number):
            self.order.take(self.me, clock)
            self.order.give(self.me, clock)
            return number + value

        return self.atomic(address, change)

    def store_floats(self, address, values, wanted=True):
        """What a block leaves for another, which overwrites it."""
        if wanted:
            assert address % VECTOR_BYTES == 0
            for i, value in enumerate(values):
                assert address + 4 * i in self.memory.writable
                self.order.writes(self.me, address + 4 * i)
                self.memory.cells[address + 4 * i] = value
        self.turns.pause()

    def store_word(self, address, word):
        self.write(address, 4, word)
        self.versions[address] = self.versions.get(address, 0) + 1
        self.turns.pause()

    # What has no function of its own

    def ptx(self, code, outputs=None, inputs=(), predicate=None):
        registers = {f"r{i}": value for i, value in enumerate(inputs)}

        def value(name, kind="f32"):
            if name.startswith("0f"):
                return np.array(int(name[2:], 16), np.uint32).view(float32)[()]
            found = registers[name] if name in registers else int(name)
            return int(found) & 2 ** int(kind[1:]) - 1 if kind[0] == "u" else found

        for guard, operation, operands in statements(code):
            if guard and not registers[guard]:
                continue
            match operation.split("."):
                case ["setp", name, kind]:
                    registers[operands[0]] = getattr(operator, name)(value(operands[1], kind), value(operands[2], kind))
                case ["selp", _]:
                    registers[operands[0]] = value(operands[1] if registers[operands[3]] else operands[2])
                case ["mov", _]:
                    registers[operands[0]] = value(operands[1])
                case ["abs", "f32"]:
                    registers[operands[0]] = np.abs(value(operands[1]))
                case ["mul", "f32"]:
                    registers[operands[0]] = value(operands[1]) * value(operands[2])
                case ["cvt", to, of]:
                    registers[operands[0]] = value(operands[1], min(to, of, key=lambda kind: int(kind[1:])))
                case ["ld", space, kind]:
                    base, _, offset = operands[1].strip("[]").partition(" + ")
                    address = registers[base] + int(offset or 0)
                    registers[operands[0]] = (
                        self.load_shared_word(address) if space == "shared" else self.read(address, int(kind[1:]) // 8)
                    )
                case ["st", "shared", _]:
                    base, _, offset = operands[0].strip("[]").partition(" + ")
                    self.store_shared_element(registers[base] + int(offset or 0), value(operands[1]))
                case _:
                    raise NotImplementedError(code)
        return registers.get("w0")


@functools.cache
def statements(code):
    """Guard, operation and operands of each."""
    code = re.sub(r"\{\$([rw]\d)\}", r"\1", code).strip().removeprefix("{").removesuffix("}")
    found = []
    for statement in filter(None, (part.strip() for part in code.split(";"))):
        guard, operation, rest = re.fullmatch(r"(?:@(\w+) )?(\S+) (.*)", statement).groups()
        if operation != ".reg":
            found.append((guard, operation, [operand.strip() for operand in rest.split(",")]))
    return found


SIGN = 1 << 31


def message_of(value):
    return int((value + float32(0.0)).view(np.uint32)) ^ SIGN


def number_of(message):
    return np.array(message ^ SIGN if message else 0, np.uint32).view(float32)[()]


ARITHMETIC = {
    "Float32": float32, "Int32": int, "Int64": int, "Boolean": bool,
    "cutlass": SimpleNamespace(
        const_expr=bool, range_constexpr=range, range=lambda *bounds, unroll: range(*map(int, bounds))
    ),
    "exp2": np.exp2, "log2": np.log2, "maximum": np.fmax, "smaller": min, "larger": max, "float_of": float32,
    "larger_pair": lambda dtype, a, b: tuple(map(np.fmax, a, b)),
    "divide": lambda a, b: a / b, "message_of": message_of, "number_of": number_of,
    "fma": lambda a, b, c: float32(np.float64(a) * np.float64(b) + np.float64(c)),
    "select_below": lambda index, bound, inside, outside: inside if 0 <= index < bound else outside,
}  # fmt: skip
